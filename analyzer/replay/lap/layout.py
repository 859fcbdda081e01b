"""Where the laps of a noted run are, what each speaks of, and whether they are equal up to a shift of blocks."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.meta.state import StreamAction
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, OUTSIDE
from analyzer.replay.match import Mismatch

from .chain import REFERENCE, TAIL
from .tape import LAP, ORDERED, STEP, Cut, Tape
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
    rows_of_block,
    specs_of_block,
)

_HELD = ("parameter", "buffer")
REACH = 2  #: how many blocks from its own a lap may speak of storages and events
LOOK = 2   #: and of modules, nodes and calls


class Layout:
    """The laps of a tape; ``before`` are the storages that were there. Raises Mismatch where laps are not periodic."""

    def __init__(self, tape: Tape, log: Log, before: Iterable[int]) -> None:
        self.log, self._before = log, set(before)
        self._events, self._last = tape.events, len(tape.chain.blocks) - 1
        self.skipped, self.gradients, self.stand_ins = tape.chain.skipped, tape.gradients, tape.stand_ins
        self.run = [place for place in range(self._last + 1) if place not in self.skipped]
        self._short = {place: i for i, place in enumerate(self.run)}
        self.stretches: list[Stretch] = []
        self.storages: dict[int, Origin] = {}
        self.marks: dict[int, Origin] = {}       # of events that were recorded on a stream
        self.nodes: dict[int, Origin] = {}
        self.births: dict[tuple[LapKind, int], list[int]] = {}
        self._first_calls: list[int] = []        # of forward laps, in order
        self._forward: list[Stretch] = []
        #: by gap between blocks that were not run: the reference block's lap, what was born, and the nodes
        self._gaps: list[tuple[Stretch, list[int], range]] = []
        self._first_nodes: list[int] = []
        self._signatures: dict[int, Any] = {}
        self.block_of_module, self.own = self._find_own(tape.chain.paths)
        self._cut_forward()
        self._cut_backward()
        #: calls on lists of all blocks' tensors, by index, and where those of blocks that were not run belong
        self.insertions: dict[int, Insertion] = {}
        if tape.stands_in is False:
            self._cut_updates(tape.states)
        self.stretches = cut_releases(self.stretches)
        self._trace()
        if any(self._outlives(number) for number in tape.returned):
            raise Mismatch("a module around the blocks gives what one of them made")
        self._check()
        self._events = []

    # ---- cuts

    def _cut_forward(self) -> None:
        """Stretches from each call of a block to the next."""
        current = Stretch(None, 0, [])
        nodes = calls = 0
        step, passed, expected = -1, -1, 0
        gap: list[Any] | None = None  # what happened since the last block that was not run
        for event in self._events:
            if event[0] == STEP:
                step, passed = event[1], -1
            if event[0] != LAP:
                (current.events if gap is None else gap).append(event)
                continue
            cut: Cut = event[1]
            if cut.block == 0:
                passed, expected = passed + 1, 0
            if cut.block != expected:
                raise Mismatch("its blocks are not called in order")
            expected += 1
            if gap is None:
                self._end(current, nodes, calls, cut)
            else:
                self._leave_out(current, gap, range(nodes, cut.nodes), cut.module_calls - calls)
            nodes, calls = cut.nodes, cut.module_calls
            if cut.block not in self._short:
                gap = []
                continue
            gap = None
            current = Stretch(("forward", step, passed), self._short[cut.block], [],
                              is_open=cut.block == self._last)
        self._end(current, nodes, calls, Cut(0, len(self.log.node_slots), len(self.log.module_call_slots)))

    def _end(self, stretch: Stretch, nodes: int, calls: int, cut: Cut) -> None:
        stretch.nodes, stretch.module_calls = range(nodes, cut.nodes), range(calls, cut.module_calls)
        self.stretches.append(stretch)

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
        self._note_forward()
        found: list[Stretch] = []
        slots = self.log.call_slots
        for stretch in self.stretches:
            found.append(stretch)
            if not stretch.is_open:
                continue
            events, stretch.events = stretch.events, []
            current = stretch
            for event in events:
                if event[0] == CALLED and (call := slots[event[1]]).phase == "backward":
                    lap = self._lap_of(call)
                    if lap is not None and (current.lap is None or (current.lap[0], current.lap[2]) != (
                            "backward", lap[0]) or lap[1] < current.block):
                        is_next = current.lap is not None and current.lap[0] == "backward" and (
                            lap == (current.lap[2], current.block - 1))
                        if not is_next and lap[1] != len(self.run) - 1:
                            raise Mismatch("its blocks' backward passes are not in order")
                        current = Stretch(("backward", call.step, lap[0]), lap[1], [], is_open=lap[1] == 0,
                                          descends=True)
                        current.nodes = range(stretch.nodes.stop, stretch.nodes.stop)
                        current.module_calls = range(stretch.module_calls.stop, stretch.module_calls.stop)
                        found.append(current)
                current.events.append(event)
            stretch.calls = [what for kind, what in stretch.events if kind == CALLED]
        self.stretches = found

    def _note_forward(self) -> None:
        for stretch in self.stretches:
            if stretch.lap is not None:
                stretch.calls = [what for kind, what in stretch.events if kind == CALLED]
                first = stretch.calls[0] if stretch.calls else len(self.log.call_slots)
                self._first_calls.append(first)
                self._first_nodes.append(stretch.nodes.start)
                self._forward.append(stretch)

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
        is_own = stretch.lap[1] == call.step and stretch.block == self._short.get(found[0])
        return (stretch.lap[2], stretch.block) if is_own else None

    def _cut_updates(self, states: dict[int, int]) -> None:
        """Stretches of what is done to each block's parameters behind the last backward pass of a step."""
        owners = {number: at for known in (self.gradients, states, {n: own[0] for n, own in self.own.items()})
                  for number, place in known.items() if (at := self._short.get(place)) is not None}
        self.stretches = cut_updates(self.stretches, owners, self.log.call_slots)
        for stretch in self.stretches:
            for kind, what in stretch.events if stretch.lap is None else ():
                if kind == CALLED and (found := find_insertion(self.log.call_slots[what], owners)) is not None:
                    self.insertions[what] = found

    # ---- what is from where

    def _trace(self) -> None:
        for stretch in self.stretches:
            if stretch.lap is None:
                self._before.update(what[0] for kind, what in stretch.events if kind == BORN)
                continue
            for place, index in enumerate(stretch.nodes):
                self.nodes[index] = Origin(stretch.lap, stretch.block, place)
            born = self.births.setdefault((stretch.lap, stretch.block), [])
            recorded = 0
            for kind, what in stretch.events:
                if kind == BORN:
                    if (number := what[0]) not in self.storages and number not in self._before:
                        self.storages[number] = Origin(stretch.lap, stretch.block, len(born))
                        born.append(number)
                elif kind == ORDERED and what[0] is StreamAction.RECORD:
                    self.marks[what[2]] = Origin(stretch.lap, stretch.block, recorded)
                    recorded += 1
        for reference, numbers, nodes in self._gaps:
            assert reference.lap is not None
            born = self.births[reference.lap, reference.block]
            for table, found, count in ((self.storages, numbers, len(born)),
                                        (self.nodes, nodes, len(reference.nodes))):
                for place, number in enumerate(found, count - len(found)):
                    table[number] = Origin(reference.lap, reference.block, place)

    def _find_own(self, paths: list[str]) -> tuple[dict[int, tuple[int, str]], dict[int, tuple[int, str]]]:
        """The block of each module below one, and of each parameter's storage, both with the rest of the path."""
        place = {path: i for i, path in enumerate(paths)}
        modules: dict[int, tuple[int, str]] = {}
        for index, module in enumerate(self.log.modules):
            parts = module.path.split(".")
            for length in range(len(parts), 0, -1):
                if (at := place.get(".".join(parts[:length]))) is not None:
                    modules[index] = at, ".".join(parts[length:])
                    break
        own: dict[int, tuple[int, str]] = {}
        for number, life in self.log.storage_table.items():
            if life.category in _HELD and (at_module := modules.get(life.module)) is not None:
                own[number] = at_module[0], life.label.removeprefix(paths[at_module[0]])
        return modules, own

    def short(self, place: int) -> int | None:
        """The number of a block among those that are run."""
        return self._short.get(place)

    # ---- whether laps are equal

    def _check(self) -> None:
        laps: dict[LapKind, dict[int, Stretch]] = {}
        for stretch in self.stretches:
            if stretch.lap is not None:
                laps.setdefault(stretch.lap, {})[stretch.block] = stretch
        count = len(self.run)
        if not laps or any(len(found) != count for lap, found in laps.items()
                       if lap[0] not in (UPDATE, RELEASE)):
            raise Mismatch("not all of its blocks have a forward and a backward pass")
        self.reach = self._find_reach(laps)
        for stretch in self.stretches:
            if stretch.lap is None or stretch.is_open:
                for kind, what in stretch.events:
                    if kind == CALLED and what in self.insertions:
                        self._check_insertion(what)
                        continue
                    if any(self._outlives(number) for number in self._speaks_of(kind, what)):
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
                self._check_rows([found for lap, found in laps.items() if lap[0] == "forward"])
                return reach
            if unequal[0][0] == UPDATE:
                raise UpdateMismatch("the optimizer does not do the same to each block")
            reason = f"the {unequal[0][0]} passes of blocks {unequal[1]} and {REFERENCE} that are run differ"
        raise Mismatch(reason)

    def _check_insertion(self, index: int) -> None:
        """What a call on lists does to the tensors of a block is what it does to those of the blocks beside it."""
        call, insertion = self.log.call_slots[index], self.insertions[index]
        found = [([[self._name(n, Stretch(None, block, []), REACH) for n in numbers]
                   for numbers in rows_of_block(call, insertion, block)],
                  _frozen(specs_of_block(call.signature, insertion, block))) for block in WINDOW]
        if any(other != found[0] for other in found):
            raise UpdateMismatch("the optimizer does not do the same to each block")

    def _check_rows(self, forward: list[dict[int, Stretch]]) -> None:
        """Nodes and calls are named by their place in a lap, also in laps that differ in what they do to memory."""
        for found in forward:
            rows = self._rows(found[REFERENCE])
            for block in range(REFERENCE - LOOK, REFERENCE + LOOK + 1):
                if self._rows(found[block]) != rows:
                    raise Mismatch(f"the forward passes of blocks {block} and {REFERENCE} that are run differ")

    def _equal(self, mine: Stretch, other: Stretch, reach: int) -> bool:
        if mine is other:
            return True
        if len(mine.events) != len(other.events) or len(mine.nodes) != len(other.nodes) or len(
                mine.module_calls) != len(other.module_calls):
            return False
        return self._rows(mine) == self._rows(other) and all(
            a == b for a, b in zip(self.canonical(mine, reach), self.canonical(other, reach)))

    def _rows(self, stretch: Stretch) -> list[Any]:
        """Its nodes and calls of modules, as seen from its block."""
        nodes, calls = self.log.node_slots, self.log.module_call_slots
        return [*(self.log.call_slots[i].signature.op for i in stretch.calls),
                *((node.op, None if node.op == "call_module" else node.target, self._module(node.module, stretch),
                   _frozen([spec for _, spec in node.outputs]), len(node.inputs), len(node.reads), node.region)
                  for i in stretch.nodes if (node := nodes[i]) is not None),
                *((self._module(call.module, stretch), _frozen(call.inputs), _frozen(call.outputs))
                  for i in stretch.module_calls if (call := calls[i]) is not None)]

    def canonical(self, stretch: Stretch, reach: int) -> Iterator[Any]:
        """Its events with everything named by where it is from, as seen from its block."""
        slots, table = self.log.call_slots, self.log.storage_table
        for kind, what in stretch.events:
            if kind == CALLED:
                call = slots[what]
                yield (self._signature(call.signature), call.phase, call.recomputed,
                       [self._name(n, stretch, reach) for n in call.inputs],
                       [self._name(n, stretch, reach) for n in call.outputs], self._module(call.module, stretch),
                       call.node if (made := self.nodes.get(call.node)) is None else self._seen(
                           made, call.node, stretch, LOOK))
            elif kind == BORN:
                life = table[what[0]]
                yield (kind, what[1], life.device, life.category, self._module(life.module, stretch),
                       self._name(what[0], stretch, reach))
            elif kind == DIED:
                yield kind, self._name(what, stretch, reach)
            elif kind == ORDERED:
                action, stream, event = what
                origin = self.marks.get(event)
                yield kind, action, stream, event if origin is None else self._seen(origin, event, stretch, reach)
            else:
                yield kind, what

    def _name(self, number: int, stretch: Stretch, reach: int) -> Any:
        own = self.own.get(number)
        if own is not None:
            at = self._short.get(own[0])
            return number if at is None else (at - stretch.block, own[1])
        origin = self.storages.get(number)
        return number if origin is None else self._seen(origin, number, stretch, reach)

    def _seen(self, origin: Origin, number: int, stretch: Stretch, reach: int) -> Any:
        distance = origin.block - stretch.block
        return (origin.lap, distance, origin.place) if abs(distance) <= reach else number

    def _module(self, module: int, stretch: Stretch) -> Any:
        found = self.block_of_module.get(module)
        at = None if found is None else self._short.get(found[0])
        if found is None or at is None or abs(at - stretch.block) > LOOK:
            return module
        return at - stretch.block, found[1]

    def _signature(self, signature: Signature) -> Any:
        """What is the same of two calls, of which each was given an object of its own for its process group."""
        found = self._signatures.get(id(signature))
        if found is None:
            found = self._signatures[id(signature)] = (
                signature.op, _frozen(signature.args), _frozen(signature.kwargs), _frozen(signature.outputs),
                self.log.groups.get(signature))
        return found

    def _speaks_of(self, kind: int, what: Any) -> tuple[int, ...]:
        if kind == CALLED:
            call = self.log.call_slots[what]
            return (*call.inputs, *call.outputs)
        return (what,) if kind == DIED else (what[0],) if kind == BORN else ()


def _frozen(value: Any) -> Any:
    """Arguments to compare: two specs are equal where they are one object."""
    if isinstance(value, TensorSpec):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [_frozen(item) for item in value]
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return type(value) if isinstance(value, torch.ScriptObject) else value
