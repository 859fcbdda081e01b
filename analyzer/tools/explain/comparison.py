"""A snapshot's peak against a prediction's: what both hold, what one of them holds alone, and the option that would
explain it.
"""
from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .prediction import PredictedBlock
from .recording.history import History
from .recording.line import Line, Lines, file_of

# Factors by which sizes differ where a dtype, a batch or a sequence does.
_FACTORS = (2, 0.5, 4, 0.25, 8, 0.125, 3, 1 / 3, 16, 1 / 16)
# Categories of snapshots in the words of predictions.
_CATEGORIES = {"before recording": "parameter", "parameters": "parameter", "gradients": "gradient",
               "activations": "activation", "optimizer states": "optimizer state"}
_EXPLAINED = 0.5  # share of what either side holds alone that a factor must match to be told


@dataclass(frozen=True)
class HeldAlone:
    """Blocks of one size and line that only one side holds."""

    count: int
    bytes: int  #: of each
    line: str
    category: str

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.count * self.bytes


@dataclass(frozen=True)
class PeakComparison:
    """Bytes that both peaks hold, and what one holds alone. ``before`` are blocks of the run that were there before
    recording began and have no counterpart: no line of theirs is known.
    """

    run_bytes: int
    predicted_bytes: int
    both_bytes: int
    both_same_line_bytes: int  #: of these, the ones whose source lines are the same too
    recorded_bytes: int        #: of these, the ones whose allocation was recorded: of others no order is known
    in_order_bytes: int        #: of those, the ones that both sides made in the same order
    same_life_bytes: int       #: of those, the ones that both sides free later on, or both keep
    only_run: list[HeldAlone]
    before: list[HeldAlone]
    only_predicted: list[HeldAlone]
    hints: list[str]

    @property
    def alone_bytes(self) -> int:
        """What one side holds alone, of both."""
        return sum(row.total_bytes for row in (*self.only_run, *self.before, *self.only_predicted))


@dataclass(frozen=True)
class _RunBlock:
    bytes: int
    line: Line
    category: str
    is_before: bool
    is_freed: bool

    @property
    def source(self) -> str | None:
        """As a prediction has it."""
        return f"{file_of(self.line.file)}:{self.line.line}" if self.line.line else None


def compare_peaks(history: History, lines: Lines, categories: Sequence[str],
                  predicted: Sequence[PredictedBlock]) -> PeakComparison:
    """Match the blocks of both peaks, those of one size and source line first, then those of one size alone."""
    run = [_RunBlock(int(history.requested[block]), lines.of_block(history, block), categories[block],
                     bool(history.born[block] < 0), bool(history.died[block] < len(history.memory.events)))
           for block in sorted(history.at(history.peak).tolist(), key=lambda block: int(history.born[block]))]
    mine, theirs = list(range(len(run))), list(range(len(predicted)))
    both: list[int] = []
    pairs: list[tuple[int, int]] = []
    for own_key, other_key in _KEYS:
        matched, left, other_left = _match([own_key(run[place]) for place in mine],
                                           [other_key(predicted[place]) for place in theirs])
        both.append(sum(run[mine[place]].bytes for place, _ in matched))
        pairs += [(mine[place], theirs[other]) for place, other in matched]
        mine, theirs = [mine[place] for place in left], [theirs[place] for place in other_left]
    made = sorted([pair for pair in pairs if not run[pair[0]].is_before])
    ordered = [made[place][0] for place in _find_longest_rise([other for _, other in made])]
    alive = [place for place, other in made if run[place].is_freed == predicted[other].is_freed]
    alone = [run[place] for place in mine]
    only_run = _group((block.bytes, str(block.line), block.category) for block in alone if not block.is_before)
    before = _group((block.bytes, str(block.line), block.category) for block in alone if block.is_before)
    only_predicted = _group((block.bytes, _name(block), block.category) for block in (predicted[i] for i in theirs))
    return PeakComparison(
        sum(block.bytes for block in run), sum(block.bytes for block in predicted), sum(both), both[0],
        sum(run[place].bytes for place, _ in made), sum(run[place].bytes for place in ordered),
        sum(run[place].bytes for place in alive), only_run, before, only_predicted,
        _find_hints(only_run, before, only_predicted))


def _find_longest_rise(numbers: Sequence[int]) -> list[int]:
    """The places of a longest run of numbers that rise, with others between them.

    >>> _find_longest_rise([0, 5, 1, 2, 4, 3])
    [0, 2, 3, 5]
    """
    ends: list[int] = []    # the least number that a run of each length can end with
    places: list[int] = []  # and where it is
    before: list[int | None] = []
    for place, number in enumerate(numbers):
        length = bisect_left(ends, number)
        before.append(places[length - 1] if length else None)
        ends[length:length + 1], places[length:length + 1] = [number], [place]
    found: list[int] = []
    at = places[-1] if places else None
    while at is not None:
        found.append(at)
        at = before[at]
    return found[::-1]


# A key of a block of the run, and the same of a predicted one: of one size and line, of one size and category, of one
# size. A line that is not known is none that is the same.
_KEYS: tuple[tuple[Callable[[_RunBlock], object], Callable[[PredictedBlock], object]], ...] = (
    (lambda block: block.source and (block.bytes, block.source),
     lambda block: block.source and (block.bytes, file_of(block.source))),
    (lambda block: (block.bytes, _CATEGORIES.get(block.category, block.category)),
     lambda block: (block.bytes, block.category)),
    (lambda block: block.bytes, lambda block: block.bytes))


def _name(block: PredictedBlock) -> str:
    """The module, of a list's alike modules all together, and the source line."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", block.line) + (f" ({file_of(block.source)})" if block.source else "")


def _match(mine: Sequence[object],
           theirs: Sequence[object]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """The places in ``mine`` that have a counterpart, with its place, those that have none, and those of ``theirs``
    that have none. Of alike ones the first is the first's.
    """
    waiting: defaultdict[object, list[int]] = defaultdict(list)
    for place, key in enumerate(theirs):
        if key is not None:
            waiting[key].append(place)
    matched, left, taken = [], [], set()
    for place, key in enumerate(mine):
        if key is not None and waiting[key]:
            matched.append((place, waiting[key].pop(0)))
            taken.add(matched[-1][1])
        else:
            left.append(place)
    return matched, left, [place for place in range(len(theirs)) if place not in taken]


def _group(rows: Iterable[tuple[int, str, str]]) -> list[HeldAlone]:
    counts = Counter(rows)
    return sorted([HeldAlone(count, *row) for row, count in counts.items()], key=lambda row: -row.total_bytes)


def _find_hints(only_run: Sequence[HeldAlone], before: Sequence[HeldAlone],
                only_predicted: Sequence[HeldAlone]) -> list[str]:
    """Options that would explain the difference."""
    hints = []
    run = Counter[int]()
    for row in [*only_run, *before]:
        run[row.bytes] += row.count
    whole = sum(row.total_bytes for row in only_predicted)
    matched, factor = max((_match_scaled(run, only_predicted, factor), factor) for factor in _FACTORS)
    alone = sum(size * count for size, count in run.items())
    if whole and matched >= _EXPLAINED * whole and matched * factor >= _EXPLAINED * alone:
        said = f"{factor:g} times as large" if factor >= 1 else f"1/{1 / factor:g} as large"
        cause = "another dtype (--dtype, --autocast), batch" if factor in (2, 0.5) else "another batch"
        hints.append(f"blocks of the run are {said} as predicted ones: {cause} or sequence (--input)")
    categories = Counter[str]()
    for row in only_predicted:
        categories[row.category] += row.total_bytes
    kinds = {row.category for row in [*only_run, *before]}
    if categories["optimizer state"] and "optimizer states" not in kinds and not before:
        hints.append("states of an optimizer are predicted and not held: another optimizer (--optimizer), or no step "
                     "was done yet")
    if categories["activation"] > 0.5 * whole and "activations" not in kinds:
        hints.append("activations are predicted that the run does not hold: checkpoints (--checkpointing)")
    if any(row.category == "optimizer states" for row in only_run) and not categories["optimizer state"]:
        hints.append("the run holds states of an optimizer that are not predicted (--optimizer)")
    return hints


def _match_scaled(run: Counter[int], predicted: Sequence[HeldAlone], factor: float) -> int:
    """The predicted bytes that have a counterpart in the run of so many times their size."""
    left, matched = Counter(run), 0
    for row in predicted:
        size = round(row.bytes * factor)
        found = min(left[size], row.count)
        left[size] -= found
        matched += found * row.bytes
    return matched
