"""A short run, cut into parts: the lap of each block in each pass, and what runs outside of blocks."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.meta.state import StreamAction
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, OUTSIDE

from .match import NotRepeated
from .short_run import AGAIN, CUT, KEPT, LEFT, ORDERED, STEP, Cut, ShortRun
from .update import Group, Owner, UpdateDiffers, find_update, group_update, list_owners

APART = 1 << 30  #: more than any distance between blocks of a chain
FAR = -APART     #: the short place of what is of no block


class Lap(NamedTuple):
    """Of which block a part is: its chain, and its places among the blocks that are run and among all. Short places of
    blocks of two chains are `APART`.
    """

    chain: int
    short: int
    place: int


@dataclass(eq=False)
class Part:
    """A stretch of the run; ``kind`` is the same for the laps of all blocks of a chain in one pass."""

    kind: int
    key: tuple[Any, ...]
    lap: Lap | None
    nodes: range = range(0)
    module_calls: range = range(0)
    events: list[tuple[int, Any]] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)  #: places of the blocks whose laps it stands for, as they run

    def __post_init__(self) -> None:
        self.copies = self.copies or [self.place]
        self.inside = 0  #: how many of its events come before its block is left
        self.begins_again = False  #: whether the step begins again with it
        self._numbers: dict[int, list[int]] = {}

    @property
    def short(self) -> int:
        return FAR if self.lap is None else self.lap.short

    @property
    def place(self) -> int:
        return 0 if self.lap is None else self.lap.place

    def numbers(self, kind: int) -> list[int]:
        """What its events of a kind are about, in order, when all of them are there."""
        found = self._numbers.get(kind)
        if found is None:
            found = self._numbers[kind] = _list_numbers(self.events, kind)
        return found

    @property
    def recorded(self) -> list[int]:
        """The events that are recorded on streams in it, in order."""
        return [what[2] for kind, what in self.events if kind == ORDERED and what[0] is StreamAction.RECORD]


class Gap(NamedTuple):
    """What was born between the last block that was not run and the one behind it, and is alive there."""

    before: Part  #: what ran last
    chain: int
    alive: dict[int, int]  #: and how many were born there up to the end, itself counted


class Cutter:
    """Cuts the events of a short run into `parts`."""

    def __init__(self, short_run: ShortRun, log: Log) -> None:
        self.log, self.chains = log, short_run.chains
        self.parts: list[Part] = []
        self.gaps: list[Gap] = []
        self.left_out: set[int] = set()  #: storages that were born between blocks that are skipped
        self.kinds: dict[tuple[Any, ...], int] = {}
        self._laps = [{place: Lap(number, number * APART + i, place) for i, place in enumerate(chain.run)}
                      for number, chain in enumerate(self.chains)]
        self._passes = [-1] * len(self.chains)
        self._expected = [(0, 0)] * len(self.chains)
        self._step = -1
        self._part_of_call: dict[int, Part] = {}
        self._part_of_node: list[Part] = []
        self._outside = 0
        self._owner = self._current = self._open(("outside", 0), None)  # of nodes, which are made in forward passes
        self._gap: list[tuple[int, Any]] | None = None  # events since a block was not run
        self._last: Cut | None = None                   # the block that was called last
        self._behind: list[Any] = []                    # calls, and requests of streams, since it was left
        #: of each chain and member: those behind its reference block
        self._surroundings: dict[tuple[int, int], list[Any]] = {}
        for event in short_run.events:
            self._take(*event)
        self._close(len(log.node_slots), len(log.module_calls))
        if self._gap is not None:
            raise NotRepeated("its last blocks are not called")
        self.owners = list_owners(short_run, log)
        self._cut_releases(short_run)

    def _open(self, key: tuple[Any, ...], lap: Lap | None, nodes: int = 0, module_calls: int = 0) -> Part:
        part = Part(self.kinds.setdefault(key, len(self.kinds)), key, lap, range(nodes, nodes),
                    range(module_calls, module_calls))
        self.parts.append(part)
        return part

    def _open_outside(self, nodes: int = 0, module_calls: int = 0) -> Part:
        self._outside += 1
        return self._open(("outside", self._outside), None, nodes, module_calls)

    def _close(self, nodes: int, module_calls: int) -> None:
        """The part that makes nodes ends; nodes and calls of modules are counted at marks alone."""
        owner = self._owner
        owner.nodes = range(owner.nodes.start, nodes)
        owner.module_calls = range(owner.module_calls.start, module_calls)
        self._part_of_node += [owner] * (nodes - len(self._part_of_node))

    def _take(self, kind: int, what: Any) -> None:
        if kind == STEP:
            self._step, self._passes = what.step, [-1] * len(self.chains)
            self._close(what.nodes, what.module_calls)
            self._current = self._owner = self._open_outside(what.nodes, what.module_calls)
            self._current.events.append((kind, what.step))
        elif kind == AGAIN:
            self._current = self._open_outside()
            self._current.begins_again = True
        elif kind == CUT:
            if self.chains[what.chain].skipped:
                self._end_surroundings()
                self._cut(what)
        elif kind == LEFT:
            self._behind = []
            if self._gap is None:
                self._current.inside = len(self._current.events)
        else:
            if kind == CALLED:
                self._behind.append(self.log.call_slots.signatures[what])
            elif kind == ORDERED:
                self._behind.append(what[:2])
            if self._gap is not None:
                self._gap.append((kind, what))
            else:
                self._add(kind, what)

    def _end_surroundings(self) -> None:
        """Another block is called: what ran behind the one before it is what ran behind the reference block."""
        last = self._last
        if last is None or last.block is None:
            return
        chain = self.chains[last.chain]
        if not chain.reference <= last.block < chain.skipped.stop:
            return
        found = list(self._behind)
        if self._surroundings.setdefault((last.chain, last.member), found) != found:
            raise NotRepeated("something else runs between blocks that are skipped")

    def _cut(self, cut: Cut) -> None:
        self._last = cut
        if cut.block is None:
            self._close(cut.nodes, cut.module_calls)
            self._current = self._owner = self._open_outside(cut.nodes, cut.module_calls)
            return
        number, place, member = cut.chain, cut.block, cut.member
        if (place, member) == (0, 0):
            self._passes[number] += 1
            self._expected[number] = 0, 0
        if (place, member) != self._expected[number]:
            raise NotRepeated("its blocks are not called in order")
        is_last = member == len(self.chains[number].members[0]) - 1
        self._expected[number] = (place + 1, 0) if is_last else (place, member + 1)
        if member:
            return
        if self._gap is None:
            self._close(cut.nodes, cut.module_calls)
        else:
            born = _list_numbers(self._gap, BORN)
            lives = [self.log.storages[number] for number in born]
            if any(life.requires_grad and life.nbytes for life in lives):  # checkpoints of torch 2.11 make an empty one
                raise NotRepeated("something with a gradient is made between blocks that are skipped")
            self.left_out.update(born)
        lap = self._laps[number].get(place)
        if lap is None:
            self._gap = []
            return
        if self._gap is not None:
            self._end_gap(number)
        self._current = self._owner = self._open(("forward", number, self._step, self._passes[number]), lap, cut.nodes,
                                                 cut.module_calls)

    def _end_gap(self, chain: int) -> None:
        """The block behind those that were not run is called. What surrounds blocks ran before it as before each; the
        reference block's lap has that already.
        """
        assert self._gap is not None
        born, dead = _list_numbers(self._gap, BORN), {*_list_numbers(self._gap, DIED)}
        self.gaps.append(Gap(self._current, chain, {
            number: len(born) - i for i, number in enumerate(born) if number not in dead}))
        self._gap = None

    def _add(self, kind: int, what: Any) -> None:
        current = self._current
        if kind == CALLED:
            found = self._backward_lap(what)
            if found is not None and (current.key, current.lap) != found:
                if current.key == found[0] and current.lap is not None and found[1].short != current.lap.short - 1:
                    raise NotRepeated("backward passes of its blocks are not in order")
                current = self._current = self._open(*found)
                current.events = _take_births(self.parts[-2].events)
            self._part_of_call[what] = current
        elif kind in (BEGAN, ENDED) and (current.key[0] == "backward" or what == "optimizer"):
            current = self._current = self._open_outside()
        current.events.append((kind, what))

    def _backward_lap(self, index: int) -> tuple[tuple[Any, ...], Lap] | None:
        """The kind and lap of a call in backward that is of a block; None of any other call."""
        if not self.chains or self.log.call_slots.phase(index) != "backward":
            return None
        node, forward, recomputed = self.log.call_slots.origin(index)
        part: Part | None = None
        if forward >= 0:
            part = self._part_of_call.get(forward)
        elif recomputed and OUTSIDE < node < len(self._part_of_node):
            part = self._part_of_node[node]
        return None if part is None or part.lap is None else (("backward", *part.key[1:]), part.lap)

    def _cut_releases(self, short_run: ShortRun) -> None:
        """What something around the blocks held of each, as autocast holds copies of weights and caches what each block
        put into its slot, dies block after block where that ends: these deaths are laps too. Deaths of stand-ins for
        what dies in a lap are dropped, for the laps of other blocks bring them.
        """
        others = short_run.stand_ins.keys() | short_run.owners.keys()
        others |= {stand_in.like for stand_in in short_run.stand_ins.values() if stand_in.repetition}
        owner_of: dict[int, Owner] = {
            number: (part.lap.chain, part.lap.place) for part in self.parts if part.lap is not None
            for number in _list_numbers(part.events, BORN) if number not in others}
        in_laps = owner_of.keys() | {
            what for part in self.parts if part.lap is not None for what in _list_numbers(part.events, DIED)}
        twice = {number for number, stand_in in short_run.stand_ins.items() if stand_in.like in in_laps}
        for part in self.parts if twice else ():
            inside, behind = ([(kind, what) for kind, what in events if kind != DIED or what not in twice]
                              for events in (part.events[:part.inside], part.events[part.inside:]))
            part.inside, part.events = len(inside), inside + behind
        parts, self.parts = self.parts, []
        for part in parts:
            self.parts.append(part)
            if part.lap is None:
                first = len(part.events) if short_run.states is None else find_update(part.events)
                update = group_update(part.events[first:], self.owners, self.log)
                groups: list[Group] = [(owner, list(events)) for owner, events in groupby(
                    part.events[:first], lambda event: owner_of.get(event[1]) if event[0] == DIED else None)]
                part.events = []
                self._split("release", groups)
                self._split("update", update)

    def _split(self, name: str, groups: list[Group]) -> None:
        """Let the last part have groups of events, and open parts where those of all blocks of a chain come one after
        the other.
        """
        while groups:
            count = self._count_laps(groups)
            owner, events = groups[0]
            if not count:
                if name == "update" and owner is not None and owner[1] == self.chains[owner[0]].reference:
                    raise UpdateDiffers("its optimizer takes blocks in another order than the model")
                self.parts[-1].events += events
                del groups[0]
                continue
            self._outside += 1
            for (chain, place), events in groups[:count]:  # type: ignore[misc]
                self._open((name, chain, self._outside), self._laps[chain][place]).events = events
            del groups[:count]
            self._open_outside()

    def _count_laps(self, groups: list[Group]) -> int:
        """How many groups are of all blocks of a chain, one after the other; 0 where the first begins none."""
        first = groups[0][0]
        if first is None:
            return 0
        run = self.chains[first[0]].run
        places = [owner[1] for owner, _ in groups[:len(run)] if owner is not None and owner[0] == first[0]]
        return len(run) if places in (run, run[::-1]) else 0


def _list_numbers(events: list[tuple[int, Any]], kind: int) -> list[int]:
    return [what for found, what in events if found == kind]


def _take_births(events: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Take out of the events before a call those that are its own: what is born for it, and what it holds."""
    first = len(events)
    for i in range(len(events) - 1, -1, -1):
        kind = events[i][0]
        if kind in (CALLED, BEGAN, ENDED, STEP):
            break
        if kind in (BORN, HELD, KEPT):
            first = i
    taken = events[first:]
    del events[first:]
    return taken


def laps_of(parts: Sequence[Part]) -> Iterator[dict[int, Part]]:
    """The laps of each kind: short place -> part."""
    found: dict[int, dict[int, Part]] = {}
    for part in parts:
        if part.lap is not None:
            laps = found.setdefault(part.kind, {})
            if part.lap.short in laps:
                raise NotRepeated("something runs in the middle of a block's pass")
            laps[part.lap.short] = part
    yield from found.values()
