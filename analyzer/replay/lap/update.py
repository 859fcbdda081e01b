"""Stretches of a noted run, and what an optimizer does to each block's parameters: laps, and places in lists."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.call_table import CallTable, OpCall
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED
from analyzer.replay.match import Mismatch

from .tape import REFERENCE, STEP

UPDATE = "update"  #: laps of what is done to a block's parameters
RELEASE = "release"  #: laps of deaths, outside of passes, of what a block made
_PHASES = ("optimizer", "zero_grad")
WINDOW = range(REFERENCE - 1, REFERENCE + 2)  # blocks whose laps have to be there
LapKind = tuple[str, int, int]
"""Forward, backward, update or release, the step, and which pass through the chain."""


class Origin(NamedTuple):
    """Where something is from: a kind of lap, the block (as numbered among those that are run), and its place there."""

    lap: LapKind
    block: int
    place: int


@dataclass
class Stretch:
    """Events from one cut to the next: a block's lap, or what runs before the first (None). One that ``is_open`` does
    not end with another block's; of one that ``descends`` the lap of the block before comes next.
    """

    lap: LapKind | None
    block: int
    events: list[Any]
    nodes: range = range(0)
    module_calls: range = range(0)
    is_open: bool = False
    descends: bool = False
    calls: list[int] = field(default_factory=list)

    def part(self, events: list[Any], lap: LapKind | None = None, block: int = 0, descends: bool = False) -> Stretch:
        """A part of it, which has neither nodes nor calls of modules of its own."""
        stop, calls = self.nodes.stop, self.module_calls.stop
        return Stretch(lap, block, events, range(stop, stop), range(calls, calls), descends=descends)


class UpdateMismatch(Mismatch):
    """The laps of an optimizer cannot be told; it may still be run on all parameters."""


# What an optimizer does to each block's parameters, found in what was noted; likewise what of each block dies when
# something lets go of all, as a cache of keys and values does.

Owned = tuple[int | None, Any]
"""A block, as numbered among those that are run, and what is done to its tensors; None: to none's."""


def cut_updates(stretches: Sequence[Stretch], owners: dict[int, int], calls: CallTable) -> list[Stretch]:
    """``stretches``, those behind a last backward pass cut into laps of blocks. ``owners`` are the blocks of known
    storages, to which those are added that are made for them. Raises UpdateMismatch where the laps are not all there.
    """
    tails = {i: _find_tail(stretch.events) for i, stretch in enumerate(stretches)
             if stretch.is_open and stretch.lap is not None and stretch.lap[0] == "backward"}
    spread_owners([row for i, (start, stop) in tails.items() for kind, what in stretches[i].events[start:stop]
                   if kind == CALLED for row in rows_of(calls[what])], owners)
    found: list[Stretch] = []
    for i, stretch in enumerate(stretches):
        found.append(stretch)
        if i in tails:
            assert stretch.lap is not None
            (start, stop), events = tails[i], stretch.events
            stretch.events = events[:start]
            blocks = [_owner(event, owners, calls) for event in events[start:stop]]
            # a storage that dies amid what is done to another block, as a loop's variable, dies in that block's lap
            rows = [(before if event[0] == DIED and owner is not None and before == after is not None else owner, event)
                    for before, owner, after, event in zip([None, *blocks], blocks, [*blocks[1:], None],
                                                           events[start:stop])]
            found += [*_cut(rows, (UPDATE, stretch.lap[1], 0), stretch), stretch.part(events[stop:])]
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


def _find_tail(events: Sequence[Any]) -> tuple[int, int]:
    """From where to where in events parameters are updated and gradients dropped."""
    start = next((i for i, (kind, what) in enumerate(events) if kind == BEGAN and what in _PHASES), len(events))
    return start, next((i for i in range(start, len(events)) if events[i][0] == STEP), len(events))


def _owner(event: tuple[int, Any], owners: Mapping[int, int], calls: CallTable) -> int | None:
    kind, what = event
    if kind == BORN or kind == DIED:
        return owners.get(what[0] if kind == BORN else what)
    if kind != CALLED:
        return None
    call = calls[what]
    found = {owners.get(number) for number in (*call.inputs, *call.outputs)}
    if length_of_lists(call.signature) > 1:
        return found.pop() if len(found) == 1 else None
    if len(found - {None}) > 1:
        raise UpdateMismatch(f"{call.signature.op} gets tensors of several blocks")
    return next(iter(found - {None}), None)


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
                yield stretch.part(others)
            others = []
            for owner, events in groups[start:stop]:
                assert owner is not None
                yield stretch.part(events, (kind, step, ordinal), owner, direction < 0)
            ordinal += 1
        elif kind == UPDATE and not set(WINDOW).isdisjoint(blocks):
            raise UpdateMismatch("the optimizer does not update one block after the other")
        else:
            others += [event for _, events in groups[start:stop] for event in events]
        start = stop
    if others:
        yield stretch.part(others)


def _turn(one: int | None, other: int | None) -> int:
    return 0 if one is None or other is None else 1 if other > one else -1


# Calls that get lists of tensors, one of each parameter: which belong together, and signatures for other lists.

def rows_of(call: OpCall) -> Sequence[Sequence[int]]:
    """The storages of a call that belong together: all of them, or those at one position of its lists."""
    length = length_of_lists(call.signature)
    if length <= 1:
        return [(*call.inputs, *call.outputs)]
    rows: list[list[int]] = [[] for _ in range(length)]
    for position, number in (*zip(list_positions(call.signature), call.inputs), *zip(range(length), call.outputs)):
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


class Insertion(NamedTuple):
    """Where in the lists of a call the tensors of the blocks of `WINDOW` are: from ``start`` on, ``length`` of each."""

    start: int
    length: int

    def place_of(self, block: int) -> slice:
        start = self.start + WINDOW.index(block) * self.length
        return slice(start, start + self.length)


def find_insertion(call: OpCall, owners: Mapping[int, int]) -> Insertion | None:
    """Where lists hold blocks' tensors, None where nowhere. Raises UpdateMismatch where their order is another."""
    if length_of_lists(call.signature) <= 1:
        return None
    blocks: list[int | None] = []
    for row in rows_of(call):
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


def insert(numbers: Sequence[int], places: Sequence[int | None], insertion: Insertion,
           others: Sequence[Mapping[int, int]], here: Mapping[int, int]) -> list[int]:
    """Storages of lists as they are ``here``, with those of blocks that were not run, as ``others`` tell them."""
    found: list[int] = []
    last, length = insertion.place_of(REFERENCE).stop - 1, insertion.length
    for i, (number, place) in enumerate(zip(numbers, places)):
        found.append(here[number])
        if place == last:
            found += [other[number] for other in others for number in numbers[i + 1 - length:i + 1]]
    return found


def _fit_lists(value: Any, length: int, fit: Callable[[Any], Any]) -> Any:
    """A part of a signature in which ``fit`` was applied to each list of that length."""
    if isinstance(value, dict):
        return {name: _fit_lists(x, length, fit) for name, x in value.items()}
    if isinstance(value, TensorSpec) or not isinstance(value, (list, tuple)):
        return value
    if len(value) != length or not isinstance(value[0], (TensorSpec, float)):
        return type(value)([_fit_lists(x, length, fit) for x in value])
    return fit(value)


def specs_of_block(signature: Signature, insertion: Insertion, block: int) -> Any:
    place, length = insertion.place_of(block), length_of_lists(signature)
    return _fit_lists([signature.args, signature.kwargs, signature.outputs], length, lambda found: found[place])


_MOST_DERIVED = 16  # of one signature: those of lists of a thousand tensors take some 100 KB each


def insert_specs(signature: Signature, insertion: Insertion, times: int) -> Signature:
    """A signature with so many more blocks' specs, shared with what profilers note in it by an optimizer's runs."""
    place, derived = insertion.place_of(REFERENCE), signature.memo.setdefault("derived", {})
    key = place.start, place.stop, times
    if key not in derived:
        if len(derived) >= _MOST_DERIVED:
            derived.clear()
        args, kwargs, outputs = (_fit_lists(value, length_of_lists(signature), lambda value: type(value)(
            [*value[:place.stop], *value[place] * times, *value[place.stop:]]))
            for value in (signature.args, signature.kwargs, signature.outputs))
        derived[key] = Signature(signature.op, args, kwargs, tuple(_specs_in((*args, *kwargs.values()))),
                                 tuple(outputs))
    return derived[key]  # type: ignore[no-any-return]


def _specs_in(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if value and isinstance(value[0], TensorSpec) and isinstance(value, list):
        return value  # lists of tensors hold nothing else
    return [spec for x in value for spec in _specs_in(x)]
