"""What an optimizer does to each block's parameters, found in what was noted: laps, and places in lists."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.call_table import CallTable, OpCall
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED
from analyzer.replay.match import Mismatch

from .chain import REFERENCE
from .tape import STEP

# Stretches of a noted run: the laps of blocks, and what runs between them.

LapKind = tuple[str, int, int]
"""Forward, backward or update, the step, and which pass through the chain."""


class Origin(NamedTuple):
    """Where something is from: a kind of lap, the block (as numbered among those that are run), and its place there."""

    lap: LapKind
    block: int
    place: int


@dataclass
class Stretch:
    """Events from one cut to the next: the lap of a block, or what runs before the first (None). ``is_open`` is one
    that ends with something else than another block's; of one that ``descends`` the lap of the block before comes next.
    """

    lap: LapKind | None
    block: int
    events: list[Any]
    nodes: range = range(0)
    module_calls: range = range(0)
    is_open: bool = False
    descends: bool = False
    calls: list[int] = field(default_factory=list)


# Calls that get lists of tensors, one of each parameter: which belong together, and signatures for other lists.

def rows_of(signature: Signature, inputs: Sequence[int], outputs: Sequence[int]) -> Sequence[Sequence[int]]:
    """The storages of a call that belong together: all of them, or those at one position of its lists."""
    length = length_of_lists(signature)
    if length <= 1:
        return [(*inputs, *outputs)]
    rows: list[list[int]] = [[] for _ in range(length)]
    for position, number in (*zip(list_positions(signature), inputs), *zip(range(length), outputs)):
        if position is not None:
            rows[position].append(number)
    return rows


def spread_owners(rows: Sequence[Sequence[int]], owners: dict[int, int]) -> None:
    """Let what stands in a row with the storages of one owner alone be that owner's, until no more is found.

    >>> owners = {1: 0, 2: 1}
    >>> spread_owners([(3, 4), (1, 3), (1, 2, 5)], owners)
    >>> owners
    {1: 0, 2: 1, 3: 0, 4: 0}
    """
    before = -1
    while len(owners) > before:
        before = len(owners)
        for row in rows:
            found = {owners[number] for number in row if number in owners}
            if len(found) == 1:
                owners.update(dict.fromkeys(row, found.pop()))


def list_positions(signature: Signature) -> list[int | None]:
    """Of each input its position in a list, None outside of lists."""
    found: list[int | None] = []
    for value in (*signature.args, *signature.kwargs.values()):
        if isinstance(value, TensorSpec):
            found.append(None)
        elif isinstance(value, (list, tuple)):
            found += [i for i, x in enumerate(value) if isinstance(x, TensorSpec)]
    return found


def length_of_lists(signature: Signature) -> int:
    """Of how many tensors the lists are that a call gets; 0 without lists."""
    return 1 + max((position for position in list_positions(signature) if position is not None), default=-1)


_MOST_DERIVED = 16  # of one signature: those of lists of a thousand tensors take some 100 KB each


def derive(signature: Signature, key: Any, fit: Callable[[Any], Any]) -> Signature:
    """A signature made of another one, which runs of the same optimizer share: with it what profilers note in it."""
    derived: dict[Any, Signature] = signature.memo.setdefault("derived", {})
    found = derived.get(key)
    if found is None:
        if len(derived) >= _MOST_DERIVED:
            derived.clear()
        args, kwargs = fit(signature.args), fit(signature.kwargs)
        found = derived[key] = Signature(signature.op, args, kwargs, tuple(specs_in((*args, *kwargs.values()))),
                                         tuple(fit(signature.outputs)))
    return found


def fit_lists(value: Any, length: int, fit: Callable[[Any], Any]) -> Any:
    """A part of a signature in which ``fit`` was applied to each list of that length."""
    if isinstance(value, dict):
        return {name: fit_lists(x, length, fit) for name, x in value.items()}
    if isinstance(value, TensorSpec) or not isinstance(value, (list, tuple)):
        return value
    if len(value) != length or not isinstance(value[0], (TensorSpec, float)):
        return type(value)([fit_lists(x, length, fit) for x in value])
    return fit(value)


def specs_in(value: Any) -> list[TensorSpec]:
    """The specs in nested lists, in order."""
    if isinstance(value, TensorSpec):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if value and isinstance(value[0], TensorSpec) and isinstance(value, list):
        return value  # lists of tensors hold nothing else
    return [spec for x in value for spec in specs_in(x)]


# What an optimizer does to each block's parameters, found in what was noted: laps, and places in lists; likewise what
# of each block dies when something lets go of all, as a cache of keys and values does.

UPDATE = "update"  #: laps of what is done to a block's parameters
RELEASE = "release"  #: laps of deaths, outside of passes, of what a block made
_PHASES = ("optimizer", "zero_grad")
WINDOW = range(REFERENCE - 1, REFERENCE + 2)  # blocks whose laps have to be there

Owned = tuple[int | None, Any]
"""A block, as numbered among those that are run, and what is done to its tensors; None: to none's."""


class UpdateMismatch(Mismatch):
    """The laps of an optimizer cannot be told; it may still be run on all parameters."""


class Insertion(NamedTuple):
    """Where in the lists of a call the tensors of the blocks of `WINDOW` are: from ``start`` on, ``length`` of each."""

    start: int
    length: int

    def place_of(self, block: int) -> slice:
        """Where those of a block are."""
        start = self.start + WINDOW.index(block) * self.length
        return slice(start, start + self.length)


def cut_updates(stretches: Sequence[Stretch], owners: dict[int, int], calls: CallTable) -> list[Stretch]:
    """``stretches``, those behind a last backward pass cut into laps of blocks. ``owners`` are the blocks of known
    storages, to which those are added that are made for them. Raises UpdateMismatch where the laps are not all there.
    """
    tails = {i: _find_tail(stretch) for i, stretch in enumerate(stretches)
             if stretch.is_open and stretch.lap is not None and stretch.lap[0] == "backward"}
    noted = [calls[what] for i, (start, stop) in tails.items() for kind, what in stretches[i].events[start:stop]
             if kind == CALLED]
    spread_owners([row for call in noted for row in _rows_of(call)], owners)
    found: list[Stretch] = []
    for i, stretch in enumerate(stretches):
        found.append(stretch)
        if i not in tails:
            continue
        assert stretch.lap is not None
        (start, stop), events = tails[i], stretch.events
        stretch.events = events[:start]
        laps = _cut(list(_let_wait([(_owner(event, owners, calls), event) for event in events[start:stop]])),
                    (UPDATE, stretch.lap[1], 0), stretch)
        found += [*laps, _between(stretch, events[stop:])]
    return found


def cut_releases(stretches: Sequence[Stretch]) -> list[Stretch]:
    """``stretches``, those behind the last block of a pass cut where what one block after the other made dies."""
    owners = {what[0]: stretch.block for stretch in stretches if stretch.lap is not None and not stretch.is_open
              for kind, what in stretch.events if kind == BORN}
    found: list[Stretch] = []
    step = -1
    for stretch in stretches:
        found.append(stretch)
        if stretch.lap is not None and not stretch.is_open:
            continue
        rows = [(owners.get(what) if kind == DIED else None, (kind, what)) for kind, what in stretch.events]
        step = next((what for kind, what in stretch.events if kind == STEP), step)
        parts = list(_cut(rows, (RELEASE, step, len(found)), stretch))
        if any(part.lap is not None for part in parts):
            stretch.events = []
            found += parts
    return found


def _find_tail(stretch: Stretch) -> tuple[int, int]:
    """From where to where in a stretch's events parameters are updated and gradients dropped."""
    events = stretch.events
    start = next((i for i, (kind, what) in enumerate(events) if kind == BEGAN and what in _PHASES), len(events))
    return start, next((i for i in range(start, len(events)) if events[i][0] == STEP), len(events))


def _rows_of(call: OpCall) -> Sequence[Sequence[int]]:
    return rows_of(call.signature, call.inputs, call.outputs)


def _owner(event: tuple[int, Any], owners: Mapping[int, int], calls: CallTable) -> int | None:
    kind, what = event
    if kind == BORN:
        return owners.get(what[0])
    if kind == DIED:
        return owners.get(what)
    if kind != CALLED:
        return None
    call = calls[what]
    numbers = (*call.inputs, *call.outputs)
    if length_of_lists(call.signature) > 1:
        every = {owners.get(number) for number in numbers}
        return every.pop() if len(every) == 1 else None
    found = {owners[number] for number in numbers if number in owners}
    if len(found) > 1:
        raise UpdateMismatch(f"{call.signature.op} gets tensors of several blocks")
    return next(iter(found), None)


def _let_wait(rows: Sequence[Owned]) -> Iterator[Owned]:
    """A storage that dies amid what is done to another block, as a loop's variable, dies in that block's lap."""
    for i, (owner, event) in enumerate(rows):
        before, after = (rows[j][0] if 0 <= j < len(rows) else None for j in (i - 1, i + 1))
        is_amid = event[0] == DIED and owner is not None and before is not None and before == after
        yield (before if is_amid else owner), event


def _cut(rows: Sequence[Owned], lap: LapKind, stretch: Stretch) -> Iterator[Stretch]:
    """Laps of blocks in turn, the first of them a ``lap``, and what is between them."""
    kind, step, ordinal = lap
    groups = [(owner, [event for _, event in group]) for owner, group in groupby(rows, key=lambda row: row[0])]
    others: list[Any] = []
    start = 0
    while start < len(groups):
        stop, direction = start + 1, 0
        while stop < len(groups) and (turn := _turn(groups[stop - 1][0], groups[stop][0])) and direction in (0, turn):
            stop, direction = stop + 1, turn
        blocks = [owner for owner, _ in groups[start:stop]]
        if set(WINDOW).issubset(blocks):
            if others:
                yield _between(stretch, others)
            others = []
            for owner, events in groups[start:stop]:
                assert owner is not None
                yield _between(stretch, events, (kind, step, ordinal), owner, direction < 0)
            ordinal += 1
        elif kind == UPDATE and not set(WINDOW).isdisjoint(blocks):
            raise UpdateMismatch("the optimizer does not update one block after the other")
        else:
            others += [event for _, events in groups[start:stop] for event in events]
        start = stop
    if others:
        yield _between(stretch, others)


def _turn(one: int | None, other: int | None) -> int:
    return 0 if one is None or other is None else 1 if other > one else -1


def _between(stretch: Stretch, events: list[Any], lap: LapKind | None = None, block: int = 0,
             descends: bool = False) -> Stretch:
    """A part of ``stretch``, which has neither nodes nor calls of modules of its own."""
    stop, calls = stretch.nodes.stop, stretch.module_calls.stop
    return Stretch(lap, block, events, range(stop, stop), range(calls, calls), descends=descends)


# ---- calls on lists


def find_insertion(call: OpCall, owners: Mapping[int, int]) -> Insertion | None:
    """Where a call's lists hold tensors of blocks; None where they hold none. Raises UpdateMismatch where they are in
    another order.
    """
    if length_of_lists(call.signature) <= 1:
        return None
    blocks: list[int | None] = []
    for row in _rows_of(call):
        found = {owners.get(number) for number in row}
        if len(found) != 1:
            raise UpdateMismatch(f"{call.signature.op} gets tensors of several blocks")
        blocks.append(found.pop())
    if set(WINDOW).isdisjoint(blocks):
        return None
    length = blocks.count(REFERENCE)
    start = blocks.index(WINDOW[0]) if WINDOW[0] in blocks else 0
    if blocks[start:start + 3 * length] != [block for block in WINDOW for _ in range(length)] or len(
            list_positions(call.signature)) != len(call.inputs):
        raise UpdateMismatch(f"{call.signature.op} does not get one block after the other")
    return Insertion(start, length)


def rows_of_block(call: OpCall, insertion: Insertion, block: int) -> Sequence[Any]:
    """Storages and what the signature says of them, of a block, by their place in the lists."""
    return _rows_of(call)[insertion.place_of(block)]


def insert(numbers: Sequence[int], places: Sequence[int | None], insertion: Insertion,
           others: Sequence[Mapping[int, int]], here: Mapping[int, int]) -> list[int]:
    """Storages of lists as they are ``here``, with those of blocks that were not run, as ``others`` tell them."""
    found: list[int] = []
    last, length = insertion.place_of(REFERENCE).stop - 1, insertion.length
    for i, (number, place) in enumerate(zip(numbers, places)):
        found.append(here[number])
        if place == last:
            mine = numbers[i + 1 - length:i + 1]
            for other in others:
                found += [other[number] for number in mine]
    return found


def specs_of_block(signature: Signature, insertion: Insertion, block: int) -> Any:
    """A signature in whose lists is what they hold for a block."""
    place, length = insertion.place_of(block), length_of_lists(signature)
    return [fit_lists(value, length, lambda found: found[place])
            for value in (signature.args, signature.kwargs, signature.outputs)]


def insert_specs(signature: Signature, insertion: Insertion, times: int) -> Signature:
    """A signature with the specs of so many more blocks in its lists."""
    place = insertion.place_of(REFERENCE)

    def fit(value: Any) -> Any:
        return type(value)([*value[:place.stop], *value[place] * times, *value[place.stop:]])

    return derive(signature, ("blocks", place.start, place.stop, times), lambda value: fit_lists(
        value, length_of_lists(signature), fit))
