"""The log of a whole run, written from that of a run of some blocks: laps are repeated, memory is simulated anew."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch

from analyzer.meta.address_space import AddressSpace
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.storage import next_number
from analyzer.meta.stream_mark import NO_EVENT, StreamAction
from analyzer.record.event import BEGAN, BORN, CALLED, DIED, ENDED, HELD, OUTSIDE
from analyzer.record.log import Log, LogModuleCall, LogNode, identifier
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.op_call import OpCall
from analyzer.record.storage_lifetime import StorageLifetime

from ..match import Mismatch
from .chain import HEAD, REFERENCE
from .layout import LOOK, LapKind, Layout, Origin, Stretch
from .tape import KEPT, ORDERED, STEP, Tape

Placed = tuple[LapKind, int]


class _Names(dict[int, int]):
    """What each storage, module or node of there is here, for one stretch; found when it is asked for first."""

    def __init__(self, find: Callable[[int, Stretch, int | None], int], stretch: Stretch, here: int | None) -> None:
        self._find, self._stretch, self._here = find, stretch, here

    def __missing__(self, number: int) -> int:
        found = self[number] = self._find(number, self._stretch, self._here)
        return found


class _Life(NamedTuple):
    """What a birth writes down."""

    device: torch.device
    name: str
    phase: str
    step: int
    node: int
    module: int
    category: str
    requires_grad: bool
    spec: object
    label: str

    @classmethod
    def of(cls, life: StorageLifetime) -> _Life:
        """That of a storage."""
        return cls(torch.device(life.device), life.device, life.phase, life.step, life.node, life.module, life.category,
                   life.requires_grad, life.spec, life.label)


class Extension:
    """Writes a `Log` in which all blocks ran. ``space`` is the memory before the first step, ``regions`` device and
    place of the storages that were there, by number.
    """

    def __init__(self, tape: Tape, before: Log, space: AddressSpace,
                 regions: Mapping[int, tuple[torch.device, Any]]) -> None:
        self.tape, self.source, self.space = tape, tape.recorder.log, space
        self.layout = Layout(tape, self.source, regions)
        self.added = len(tape.chain.skipped)
        self._regions: dict[int, tuple[torch.device, Any]] = dict(regions)
        recorder = tape.recorder
        device = torch.device(self.source.device)
        mode = MetaTensorMode(recorder.mode.options, space=space)
        self.writer = MemoryRecorder(mode, device)
        self.log = self.writer.log = before
        self._before = tuple(before.storage_table)
        if before.keeps_allocator_events:
            self.writer.memory.observer = self._observe
        self._lives: dict[int, _Life] = {}
        self._read: dict[int, OpCall] = {}
        self._layouts: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        for (number, shape), placements in self.source.layouts.items():
            self._layouts.setdefault(number, []).append((shape, placements))
        self.born: dict[Placed, list[int]] = {}
        self._recorded: dict[Placed, list[int]] = {}
        self._call_at: dict[Placed, tuple[int, int]] = {}  # the first call of a forward lap there and here
        self._node_at: dict[Placed, tuple[int, int]] = {}
        self._module_call_at: dict[Placed, tuple[int, int]] = {}
        self._calls: dict[int, int] = {}
        self._nodes: dict[int, int] = {OUTSIDE: OUTSIDE}
        self._module_calls: dict[int, int] = {}
        self._own = {named: number for number, named in self.layout.own.items()}
        self._modules = {named: index for index, named in self.layout.block_of_module.items()}
        self._named_node: dict[int, tuple[int, int, int, str]] = {}
        self._node_named: dict[tuple[int, int, int, str], int] = {}
        self._lap_of_call: dict[int, Origin] = {}
        self._lap_of_module_call: dict[int, Origin] = {}

    def _observe(self, action: str, address: int, nbytes: int) -> None:
        self.log.allocator_event_slots.append(action, address, nbytes, len(self.log.call_slots))

    def write(self) -> Log:
        """Write the whole log. Raises Mismatch where that is found not to be possible."""
        self._trace()
        clones = range(HEAD, HEAD + self.added)
        for stretch in self.layout.stretches:
            here = None if stretch.lap is None else self._extended(stretch.block)
            if stretch.lap is not None and stretch.block == REFERENCE and stretch.lap[0] == "backward":
                for place in reversed(clones):
                    self._write(stretch, place)
            self._write(stretch, here)
            if stretch.lap is not None and stretch.block == REFERENCE and stretch.lap[0] == "forward":
                for place in clones:
                    self._write(stretch, place)
        self.writer.end()
        self.writer.memory.observer = None
        self._finish()
        return self.log

    def _extended(self, block: int) -> int:
        return block if block <= REFERENCE else block + self.added

    def _trace(self) -> None:
        for stretch in self.layout.stretches:
            if stretch.lap is None or stretch.is_open:
                self._trace_own(stretch)
            if stretch.lap is not None:
                for table, items in ((self._lap_of_call, stretch.calls),
                                     (self._lap_of_module_call, stretch.module_calls)):
                    for i, item in enumerate(items):
                        table[item] = Origin(stretch.lap, stretch.block, i)

    def _trace_own(self, stretch: Stretch) -> None:
        """Nodes between passes that are of a block's parameters, as those that make views of all once."""
        counts: dict[Any, int] = {}
        for index in stretch.nodes:
            node = self.source.node_slots[index]
            named = None if node is None or not node.outputs else self.layout.own.get(node.outputs[0][0])
            if named is not None:
                counts[named] = counts.get(named, -1) + 1
                self._named_node[index] = key = (id(stretch), counts[named], *named)
                self._node_named[key] = index

    def _finish(self) -> None:
        log, source = self.log, self.source
        log.saved_inputs, log.groups, log.steps = source.saved_inputs, source.groups, source.steps
        for number in self._before:
            mine, theirs = log.storage_table[number], source.storage_table[number]
            mine.category, mine.label, mine.requires_grad = theirs.category, theirs.label, theirs.requires_grad
        self._copy_layouts()
        log.outer_calls = [call._replace(position=self._calls.get(call.position, len(log.call_slots)))
                           for call in source.outer_calls]
        for module, run in zip(log.modules, source.modules):
            module.calls, module.inputs, module.outputs = run.calls, run.inputs, run.outputs
        reference = self.layout.run[REFERENCE]
        for index, (place, path) in self.layout.block_of_module.items():
            if place in self.tape.chain.skipped:
                run, module = source.modules[self._modules[reference, path]], log.modules[index]
                module.calls, module.inputs, module.outputs = run.calls, run.inputs, run.outputs

    def _copy_layouts(self) -> None:
        """Those of storages that are there as they are here, and of parameters of blocks that were not run."""
        layouts = self.log.layouts
        layouts.update(self.source.layouts)
        reference = self.layout.run[REFERENCE]
        for number, (place, name) in self.layout.own.items():
            if place == reference:
                for shape, placements in self._layouts.get(number, ()):
                    for other in self.tape.chain.skipped:
                        layouts[self._own[other, name], shape] = placements

    # ---- names

    def _seen(self, origin: Origin, stretch: Stretch, here: int | None, reach: int) -> int | None:
        """The block here that something is from, seen from a stretch; None: it is what it is there."""
        distance = origin.block - stretch.block
        if here is None or stretch.is_open or abs(distance) > reach:
            return None
        return here + distance

    def _storage(self, number: int, stretch: Stretch, here: int | None) -> int:
        layout = self.layout
        stand_in = self.tape.stand_ins.get(number)
        if stand_in is not None:
            place, beside = stand_in
            return self._gradient(beside, place, REFERENCE)
        own = layout.own.get(number)
        if own is not None:
            at = layout.short(own[0])
            if here is None or at is None or stretch.is_open:
                return number
            return self._own[here + at - stretch.block, own[1]]
        origin = layout.storages.get(number)
        if origin is None:
            return number
        if (stretch.is_open or here is None) and (owner := self.tape.gradients.get(number)) is not None:
            return self._gradient(number, owner, layout.short(owner))
        place_here = self._seen(origin, stretch, here, layout.reach)
        if place_here is None:
            return number
        return self.born[origin.lap, place_here][origin.place]

    def _gradient(self, number: int, place: int, beside: int | None) -> int:
        """The gradient of the block at ``place`` that stands where ``number`` stands for block ``beside``."""
        origin = self.layout.storages.get(number)
        if origin is None or beside is None or abs(origin.block - beside) > self.layout.reach:
            if place in self.tape.chain.skipped:
                raise Mismatch("a gradient is not from its block's backward pass")
            return number
        return self.born[origin.lap, place + origin.block - beside][origin.place]

    def _mark(self, event: int, stretch: Stretch, here: int | None) -> int:
        origin = self.layout.marks.get(event)
        place = None if origin is None else self._seen(origin, stretch, here, self.layout.reach)
        return event if origin is None or place is None else self._recorded[origin.lap, place][origin.place]

    def _module(self, index: int, stretch: Stretch, here: int | None) -> int:
        found = self.layout.block_of_module.get(index)
        at = None if found is None else self.layout.short(found[0])
        if found is None or at is None or here is None or stretch.is_open or abs(at - stretch.block) > LOOK:
            return index
        return self._modules[here + at - stretch.block, found[1]]

    def _index(self, index: int, stretch: Stretch, here: int | None, origins: Mapping[int, Origin],
               starts: Mapping[Placed, tuple[int, int]], others: Mapping[int, int]) -> int:
        """Where a node, a call or a module's call of there is here."""
        origin = origins.get(index)
        if origin is None:
            return others.get(index, index)
        place = self._seen(origin, stretch, here, LOOK)
        if place is None:
            place = self._extended(origin.block)
        return starts[origin.lap, place][1] + origin.place

    def _node(self, index: int, stretch: Stretch, here: int | None) -> int:
        if index == OUTSIDE:
            return OUTSIDE
        named = self._named_node.get(index)
        if named is not None and here is not None and not stretch.is_open:
            at = self.layout.short(named[2])
            if at is not None:
                index = self._node_named.get((*named[:2], here + at - stretch.block, named[3]), index)
        return self._index(index, stretch, here, self.layout.nodes, self._node_at, self._nodes)

    # ---- stretches

    def _write(self, stretch: Stretch, here: int | None) -> None:
        log = self.log
        is_copy = here is not None and here != self._extended(stretch.block)
        if stretch.lap is not None and here is not None:
            key = stretch.lap, here
            self.born[key], self._recorded[key] = [], []
            self._node_at[key] = stretch.nodes.start, len(log.node_slots)
            self._module_call_at[key] = stretch.module_calls.start, len(log.module_call_slots)
            self._call_at[key] = 0, len(log.call_slots)
        for index in stretch.nodes:
            if stretch.lap is None:
                self._nodes[index] = len(log.node_slots)
            log.node_slots.append(copy(self.source.node_slots[index]))
        self._write_module_calls(stretch, here)
        self._storages = _Names(self._storage, stretch, here)
        self._modules_here = _Names(self._module, stretch, here)
        self._nodes_here = _Names(self._node, stretch, here)
        for kind, what in stretch.events:
            if kind == CALLED:
                self._write_call(what, stretch, here, is_copy)
            elif kind == BORN:
                self._bear(what, stretch, here)
            elif kind == DIED:
                self._free(self._storages[what])
            else:
                self._write_other(kind, what, stretch, here, is_copy)
        for place in range(len(log.node_slots) - len(stretch.nodes), len(log.node_slots)):
            self._write_node(log.node_slots[place])

    def _write_node(self, node: LogNode | None) -> None:
        assert node is not None
        storages, nodes, module = self._storages, self._nodes_here, self._modules_here[node.module]
        if module != node.module and node.op == "call_module":
            node.target = self.log.modules[module].path
            node.base = identifier(node.target)
        node.module = module
        node.inputs = tuple([nodes[i] for i in node.inputs])
        node.reads = tuple([storages[n] for n in node.reads])
        node.outputs = tuple([(storages[n], spec) for n, spec in node.outputs])

    def _write_module_calls(self, stretch: Stretch, here: int | None) -> None:
        slots = self.log.module_call_slots
        for index in stretch.module_calls:
            call = self.source.module_call_slots[index]
            assert call is not None
            if stretch.lap is None:
                self._module_calls[index] = len(slots)
            parent = None if call.parent is None else self._index(
                call.parent, stretch, here, self._lap_of_module_call, self._module_call_at, self._module_calls)
            slots.append(LogModuleCall(self._module(call.module, stretch, here), parent, call.inputs, call.outputs))

    def _write_call(self, index: int, stretch: Stretch, here: int | None, is_copy: bool) -> None:
        call, log = self._read.get(index), self.log
        if call is None:
            call = self._read[index] = self.source.call_slots[index]
        storages = self._storages
        if not is_copy:
            self._calls[index] = len(log.call_slots)
        forward = call.forward
        if forward is not None:
            if forward in self._lap_of_call:
                forward = self._index(forward, stretch, here, self._lap_of_call, self._call_at, self._calls)
            else:
                forward = self._calls[forward]
        log.call_slots.append(
            call.signature, [storages[n] for n in call.inputs], [storages[n] for n in call.outputs], call.step,
            call.phase, self._modules_here[call.module], self._nodes_here[call.node], forward, call.recomputed)

    def _bear(self, what: tuple[int, int], stretch: Stretch, here: int | None) -> None:
        number, nbytes = what
        log, life, origin = self.log, self._lives.get(number), self.layout.storages.get(number)
        if life is None:
            life = self._lives[number] = _Life.of(self.source.storage_table[number])
        if origin is not None and here is not None and origin[:2] == (stretch.lap, stretch.block) and len(
                born := self.born[origin.lap, here]) == origin.place:  # for the first time
            mine = number if here == self._extended(stretch.block) else next_number()
            born.append(mine)
            self._storages[number] = mine
            for shape, placements in self._layouts.get(number, ()):
                log.layouts[mine, shape] = placements
        else:
            mine = self._storages[number]
        region = self.space.reserve(life.device, nbytes)
        self._regions[mine] = life.device, region
        log.events += 1
        made = log.storage_table[mine] = StorageLifetime(
            log.lifetime_table, mine, nbytes, region.bytes, region.address, life.name, log.events, len(log.call_slots),
            life.phase, life.step, self._nodes_here[life.node], self._modules_here[life.module])
        if life.category:
            made.category = life.category
        if life.requires_grad:
            made.requires_grad = True
        made.spec, made.label = life.spec, life.label
        if self.writer.memory.allocated_bytes > log.peak_bytes:
            self.writer.watch_peak(0)

    def _free(self, number: int) -> None:
        log, placed = self.log, self._regions.pop(number, None)
        life = log.storage_table.get(number)
        if placed is None or life is None:
            raise Mismatch("a storage dies that was not known")
        log.events += 1
        life.died, life.died_call = log.events, len(log.call_slots)
        self.space.give_back(*placed)

    def _write_other(self, kind: int, what: Any, stretch: Stretch, here: int | None, is_copy: bool) -> None:
        writer = self.writer
        if kind == BEGAN:
            writer.begin(what)
        elif kind == ENDED:
            writer.end()
        elif kind == STEP:
            writer.step = what
        elif kind == HELD:
            claim, blocks = what
            held = [self.space.reserve(claim, nbytes) for nbytes in blocks]
            writer.took_workspace(sum(region.bytes for region in held), claim, blocks)
            for region in held:
                self.space.give_back(claim, region)
        elif kind == KEPT:
            life = self.source.storage_table[what]
            claim = torch.device(life.device)
            region = self.space.library_workspaces[what,] = self.space.reserve(claim, life.nbytes)
            writer.kept_workspace(region, life.nbytes, claim, life.label)
        elif kind == ORDERED:
            action, stream, event = what
            if action is StreamAction.SWITCH:
                self.space.stream = stream
            elif action is StreamAction.RECORD and is_copy:
                event = -next_number()
            elif action is not StreamAction.RECORD and event != NO_EVENT:
                event = self._mark(event, stretch, here)
            if action is StreamAction.RECORD and stretch.lap is not None and here is not None:
                self._recorded[stretch.lap, here].append(event)
            writer.ordered(action, stream, event)
        else:
            raise Mismatch("something that is not known happened")
