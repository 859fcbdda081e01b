"""Where the laps of a noted run are, what each speaks of, and whether they are equal up to a shift of blocks."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from analyzer.meta.spec import Signature
from analyzer.meta.state import StreamAction
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, OUTSIDE
from analyzer.replay.compare import comparable, comparable_signature
from analyzer.replay.match import Mismatch

from .tape import LAP, ORDERED, REFERENCE, STEP, TAIL, LapCut, LapTape
from .update import (
    RELEASE,
    UPDATE,
    WINDOW,
    Insertion,
    LapKind,
    Origin,
    Stretch,
    UpdateMismatch,
    cut_releases,
    cut_updates,
    find_insertion,
    rows_of,
    specs_of_block,
)

REACH = 2  #: how many blocks from its own a lap may speak of storages and events
LOOK = 2   #: and of modules, nodes and calls


class Away(NamedTuple):
    """What something is called in a lap: its lap's kind (None: its block's own), blocks away, place or path there."""

    lap: LapKind | None
    distance: int
    place: Any


class Layout:
    """The laps of a tape; ``before`` are the storages that were there. Raises Mismatch where laps are not periodic."""

    def __init__(self, tape: LapTape, log: Log, before: Iterable[int]) -> None:
        self.log, self._before = log, set(before)
        self.skipped, self.gradients, self.stand_ins = tape.chain.skipped, tape.gradients, tape.stand_ins
        self.run = [place for place in range(len(tape.chain.blocks)) if place not in self.skipped]
        self.short = {place: i for i, place in enumerate(self.run)}  #: of a block among those that are run
        self.stretches: list[Stretch] = []
        self.storages: dict[int, Origin] = {}
        self.marks: dict[int, Origin] = {}       #: of events that were recorded on a stream
        self.nodes: dict[int, Origin] = {}
        self._forward: list[Stretch] = []
        #: by gap between blocks that were not run: the reference block's lap, what was born, and the nodes
        self._gaps: list[tuple[Stretch, list[int], range]] = []
        self._find_own(tape.chain.paths)
        self._cut_forward(tape.events)
        self._cut_backward()
        #: calls on lists of all blocks' tensors, by index, and where those of blocks that were not run belong
        self.insertions: dict[int, Insertion] = {}
        if not tape.stands_in:
            owners = {number: at for known in (self.gradients, tape.states, {n: own[0] for n, own in self.own.items()})
                      for number, place in known.items() if (at := self.short.get(place)) is not None}
            self.stretches = cut_updates(self.stretches, owners, log.call_slots)
            self.insertions.update(
                (what, found) for stretch in self.stretches if stretch.lap is None for kind, what in stretch.events
                if kind == CALLED and (found := find_insertion(log.call_slots[what], owners)) is not None)
        self.stretches = cut_releases(self.stretches)
        self._trace()
        if any(self._outlives(number) for number in tape.returned):
            raise Mismatch("a module around the blocks gives what one of them made")
        self._check()

    def _find_own(self, paths: list[str]) -> None:
        """The block of each module below one, and of each parameter's storage, both with the rest of the path."""
        place = {path: i for i, path in enumerate(paths)}
        self.block_of_module: dict[int, tuple[int, str]] = {}
        for index, module in enumerate(self.log.modules):
            parts = module.path.split(".")
            for length in range(len(parts), 0, -1):
                if (at := place.get(".".join(parts[:length]))) is not None:
                    self.block_of_module[index] = at, ".".join(parts[length:])
                    break
        self.own = {
            number: (found[0], life.label.removeprefix(paths[found[0]])) for number, life in
            self.log.storage_table.items() if life.category in ("parameter", "buffer")
            and (found := self.block_of_module.get(life.module)) is not None}

    def _cut_forward(self, events: list[Any]) -> None:
        """Stretches from each call of a block to the next."""
        current = Stretch(None, 0, [])
        nodes = calls = expected = 0
        step = passed = -1
        gap: list[Any] | None = None  # what happened since the last block that was not run
        for event in (*events, (LAP, LapCut(0, len(self.log.node_slots), len(self.log.module_call_slots)))):
            if event[0] == STEP:
                step, passed = event[1], -1
            if event[0] != LAP:
                (current.events if gap is None else gap).append(event)
                continue
            cut: LapCut = event[1]
            if cut.block == 0:
                passed, expected = passed + 1, 0
            if cut.block != expected:
                raise Mismatch("its blocks are not called in order")
            expected += 1
            if gap is None:
                current.nodes, current.module_calls = range(nodes, cut.nodes), range(calls, cut.module_calls)
                self.stretches.append(current)
            else:
                self._leave_out(current, gap, range(nodes, cut.nodes), cut.module_calls - calls)
            nodes, calls = cut.nodes, cut.module_calls
            gap = None if cut.block in self.short else []
            if gap is None:
                current = Stretch(("forward", step, passed), self.short[cut.block], [],
                                  is_open=cut.block == self.run[-1])

    def _leave_out(self, reference: Stretch, gap: list[Any], nodes: range, calls: int) -> None:
        """What runs between two blocks that were not run has to be what runs behind the reference block."""
        behind = reference.events[len(reference.events) - len(gap):]
        if calls > 1 or [self._outline(*event) for event in gap] != [self._outline(*event) for event in behind]:
            raise Mismatch("something else runs between blocks that are not run")
        self._gaps.append((reference, [what[0] for kind, what in gap if kind == BORN], nodes))

    def _outline(self, kind: int, what: Any) -> Any:
        """An event, whichever storages it is of."""
        if kind == CALLED:
            return kind, self._signature(self.log.call_slots[what].signature)
        return (kind, what[1]) if kind == BORN else (kind,) if kind == DIED else (kind, what)

    def _cut_backward(self) -> None:
        """Stretches from the first call of a block's backward pass to that of the block before it."""
        slots, found = self.log.call_slots, list[Stretch]()
        for stretch in self.stretches:
            stretch.calls = [what for kind, what in stretch.events if kind == CALLED]
        self._forward = [stretch for stretch in self.stretches if stretch.lap is not None]
        self._first_calls = [s.calls[0] if s.calls else len(slots) for s in self._forward]
        self._first_nodes = [s.nodes.start for s in self._forward]
        for stretch in self.stretches:
            found.append(stretch)
            if not stretch.is_open:
                continue
            events, stretch.events = stretch.events, []
            current = stretch
            for event in events:
                if event[0] == CALLED and (call := slots[event[1]]).phase == "backward" and (
                        lap := self._lap_of(call)) is not None:
                    is_same = current.lap is not None and current.lap[::2] == ("backward", lap[0])
                    if not is_same or lap[1] < current.block:
                        if lap[1] != (current.block if is_same else len(self.run)) - 1 and lap[1] != len(self.run) - 1:
                            raise Mismatch("its blocks' backward passes are not in order")
                        current = stretch.part([], ("backward", call.step, lap[0]), lap[1], descends=True)
                        current.is_open = lap[1] == 0
                        found.append(current)
                current.events.append(event)
            stretch.calls = [what for kind, what in stretch.events if kind == CALLED]
        self.stretches = found

    def _lap_of(self, call: Any) -> tuple[int, int] | None:
        """The pass and the block whose backward pass, or recomputation, a call is of."""
        if call.forward is not None:
            at, module = bisect_right(self._first_calls, call.forward) - 1, self.log.call_slots.place(call.forward)[0]
        elif call.recomputed and call.node != OUTSIDE:
            at, module = bisect_right(self._first_nodes, call.node) - 1, call.module
        else:
            return None
        found = self.block_of_module.get(module)
        if at < 0 or found is None:
            return None
        stretch = self._forward[at]
        assert stretch.lap is not None
        is_own = stretch.lap[1] == call.step and stretch.block == self.short.get(found[0])
        return (stretch.lap[2], stretch.block) if is_own else None

    def _trace(self) -> None:
        births: dict[tuple[LapKind, int], int] = {}  # how many storages are born in a lap
        for stretch in self.stretches:
            if stretch.lap is None:
                self._before.update(what[0] for kind, what in stretch.events if kind == BORN)
                continue
            self.nodes.update((index, Origin(stretch.lap, stretch.block, i)) for i, index in enumerate(stretch.nodes))
            born = recorded = 0
            for kind, what in stretch.events:
                if kind == BORN and what[0] not in self.storages and what[0] not in self._before:
                    self.storages[what[0]] = Origin(stretch.lap, stretch.block, born)
                    born += 1
                elif kind == ORDERED and what[0] is StreamAction.RECORD:
                    self.marks[what[2]] = Origin(stretch.lap, stretch.block, recorded)
                    recorded += 1
            births[stretch.lap, stretch.block] = born
        for reference, numbers, nodes in self._gaps:
            lap, block = reference.lap, reference.block
            assert lap is not None
            for table, found, count in ((self.storages, numbers, births[lap, block]),
                                        (self.nodes, nodes, len(reference.nodes))):
                table.update((number, Origin(lap, block, i)) for i, number in enumerate(found, count - len(found)))

    def name(self, number: int, stretch: Stretch, reach: int) -> Away | int:
        """What a storage is called in a stretch; what lies further away goes by its number."""
        own = self.own.get(number)
        if own is not None:
            at = self.short.get(own[0])
            return number if at is None else Away(None, at - stretch.block, own[1])
        return self.seen(number, self.storages, stretch, reach)

    def seen(self, number: int, origins: Mapping[int, Origin], stretch: Stretch, reach: int) -> Away | int:
        """What something that is from a lap is called in a stretch."""
        origin = origins.get(number)
        if origin is None or abs(origin.block - stretch.block) > reach:
            return number
        return Away(origin.lap, origin.block - stretch.block, origin.place)

    def module(self, module: int, stretch: Stretch) -> Away | int:
        found = self.block_of_module.get(module)
        at = None if found is None else self.short.get(found[0])
        if found is None or at is None or abs(at - stretch.block) > LOOK:
            return module
        return Away(None, at - stretch.block, found[1])

    def _canonical(self, stretch: Stretch, reach: int) -> Iterator[Any]:
        """Its events with everything named as seen from its block."""
        for kind, what in stretch.events:
            if kind == CALLED:
                call = self.log.call_slots[what]
                yield (self._signature(call.signature), call.phase, call.recomputed,
                       [self.name(n, stretch, reach) for n in call.inputs],
                       [self.name(n, stretch, reach) for n in call.outputs], self.module(call.module, stretch),
                       self.seen(call.node, self.nodes, stretch, LOOK))
            elif kind == BORN:
                life = self.log.storage_table[what[0]]
                yield (kind, what[1], life.device, life.category, self.module(life.module, stretch),
                       self.name(what[0], stretch, reach))
            elif kind == DIED:
                yield kind, self.name(what, stretch, reach)
            elif kind == ORDERED:
                yield kind, *what[:2], self.seen(what[2], self.marks, stretch, reach)
            else:
                yield kind, what

    def _check(self) -> None:
        laps: dict[LapKind, dict[int, Stretch]] = {}
        for stretch in self.stretches:
            if stretch.lap is not None:
                laps.setdefault(stretch.lap, {})[stretch.block] = stretch
        if not laps or any(len(found) != len(self.run) for lap, found in laps.items()
                           if lap[0] not in (UPDATE, RELEASE)):
            raise Mismatch("not all of its blocks have a forward and a backward pass")
        self.reach = self._find_reach(laps)
        for stretch in self.stretches:
            for kind, what in stretch.events if stretch.lap is None or stretch.is_open else ():
                if kind == CALLED and what in self.insertions:
                    self._check_insertion(what)
                    continue
                call = self.log.call_slots[what] if kind == CALLED else None
                spoken_of = (*call.inputs, *call.outputs) if call is not None else (
                    what if kind == DIED else what[0],) if kind in (BORN, DIED) else ()
                if any(map(self._outlives, spoken_of)):
                    raise Mismatch("something outlives the blocks next to its own")

    def _outlives(self, number: int) -> bool:
        """Whether a storage that something outside of laps speaks of is the reference block's; others are missing."""
        origin = self.storages.get(number)
        return origin is not None and origin.block == REFERENCE and number not in self.gradients

    def _find_reach(self, laps: dict[LapKind, dict[int, Stretch]]) -> int:
        reason = ""
        for reach in range(REACH, 0, -1):
            window = range(REFERENCE - reach, REFERENCE + min(reach, TAIL - 1) + 1)
            unequal = next(((lap, block) for lap, found in laps.items() for block in window
                            if block not in found or not self._equal(found[block], found[REFERENCE], reach)), None)
            if unequal is None:
                break
            if unequal[0][0] == UPDATE:
                raise UpdateMismatch("the optimizer does not do the same to each block")
            reason = f"the {unequal[0][0]} passes of blocks {unequal[1]} and {REFERENCE} that are run differ"
        else:
            raise Mismatch(reason)
        # nodes and calls are named by their place in a lap, also in laps that differ in what they do to memory
        for found in [found for lap, found in laps.items() if lap[0] == "forward"]:
            rows = self._rows(found[REFERENCE])
            for block in range(REFERENCE - LOOK, REFERENCE + LOOK + 1):
                if self._rows(found[block]) != rows:
                    raise Mismatch(f"the forward passes of blocks {block} and {REFERENCE} that are run differ")
        return reach

    def _check_insertion(self, index: int) -> None:
        """What a call on lists does to the tensors of a block is what it does to those of the blocks beside it."""
        call, insertion = self.log.call_slots[index], self.insertions[index]
        found = [([[self.name(n, Stretch(None, block, []), REACH) for n in numbers]
                   for numbers in rows_of(call)[insertion.place_of(block)]],
                  comparable(specs_of_block(call.signature, insertion, block))) for block in WINDOW]
        if any(other != found[0] for other in found):
            raise UpdateMismatch("the optimizer does not do the same to each block")

    def _equal(self, mine: Stretch, other: Stretch, reach: int) -> bool:
        return mine is other or len(mine.events) == len(other.events) and self._rows(mine) == self._rows(
            other) and all(a == b for a, b in zip(self._canonical(mine, reach), self._canonical(other, reach)))

    def _rows(self, stretch: Stretch) -> list[Any]:
        """Its calls, nodes and calls of modules, as seen from its block."""
        nodes, calls = self.log.node_slots, self.log.module_call_slots
        return [[self.log.call_slots[i].signature.op for i in stretch.calls],
                [(node.op, None if node.op == "call_module" else node.target, self.module(node.module, stretch),
                  comparable([spec for _, spec in node.outputs]), len(node.inputs), len(node.reads), node.region)
                 for i in stretch.nodes if (node := nodes[i]) is not None],
                [(self.module(call.module, stretch), comparable(call.inputs), comparable(call.outputs))
                 for i in stretch.module_calls if (call := calls[i]) is not None]]

    def _signature(self, signature: Signature) -> Any:
        """What is the same of two calls, of which each was given an object of its own for its process group."""
        return comparable_signature(signature), self.log.groups.get(signature)
