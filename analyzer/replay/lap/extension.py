"""The log of a run of all blocks, written from that of some."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from typing import Any

import torch

from analyzer.memory.allocator_segment import Span
from analyzer.meta.address_space import AddressSpace, MetaStorage, next_number, take_numbers
from analyzer.meta.state import NO_EVENT, StreamAction
from analyzer.record.failure import first_line
from analyzer.record.log import Log
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, StorageLifetime
from analyzer.replay.cache_slot import list_counting, noting_slots
from analyzer.replay.match import CAPTURES, Mismatch, watch_reads

from .layout import Layout
from .replayed_lap import LapSegment, Naming, Regions, ReplayedLap, renamed_node
from .tape import KEPT, ORDERED, REFERENCE, STEP, LapTape, RankChain
from .update import LapKind, Stretch, insert, insert_specs, list_positions


class Extension:
    """Writes a `Log` in which all blocks ran, on the memory ``space`` of before, with storages in ``regions``."""

    def __init__(self, tape: LapTape, before: Log, space: AddressSpace,
                 regions: Mapping[int, tuple[torch.device, Any]]) -> None:
        recorder = tape.recorder
        self.source, self.log, self.space = recorder.log, before, space
        self.layout = Layout(tape, self.source, regions)
        self.naming = Naming(self.layout, self.source)
        self._regions: Regions = dict(regions)
        self.writer = MemoryRecorder(space, torch.device(self.source.device), before)
        self._before = tuple(before.storage_table)
        if before.keeps_allocator_events:
            self.writer.keep_allocator_events()
        self._segments: dict[LapKind, LapSegment] = {}

    def write(self) -> Log:
        beside = Stretch(None, REFERENCE, [])
        # of each block that was not run, what stands in lists where the reference block's storages stand
        self._others = [self.naming.names(self._storage, beside, place) for place in self.layout.skipped]
        for stretch in self.layout.stretches:
            clones = self.layout.skipped if stretch.lap is not None and stretch.block == REFERENCE else ()
            for place in reversed(clones) if stretch.descends else ():
                self._replay(stretch, place)
            self._write(stretch, None if stretch.lap is None else self.layout.run[stretch.block])
            for place in clones if not stretch.descends else ():
                self._replay(stretch, place)
        self.writer.end()
        self.writer.allocator.observer = None
        self._finish()
        del self._others, self._storages  # which know this object: a cycle would keep the log
        return self.log

    def _finish(self) -> None:
        log, source, layout, naming = self.log, self.source, self.layout, self.naming
        log.saved_inputs, log.groups, log.steps = source.saved_inputs, source.groups, source.steps
        for number in self._before:
            mine, theirs = log.storage_table[number], source.storage_table[number]
            mine.category, mine.label, mine.requires_grad = theirs.category, theirs.label, theirs.requires_grad
        # layouts of storages that are there as they are here, and of parameters of blocks that were not run
        log.layouts.update(source.layouts)
        for number, (place, name) in layout.own.items():
            for shape, placements in naming.placements.get(number, ()) if place == REFERENCE else ():
                log.layouts.update(((naming.own[other, name], shape), placements) for other in layout.skipped)
        log.outer_calls = [call._replace(position=naming.calls.get(call.position, len(log.call_slots)))
                           for call in source.outer_calls]
        log.compiled_calls.clear()
        for compiled in source.compiled_calls:
            log.compiled_calls.append(compiled)
            place, path = layout.block_of_module.get(compiled.module, (-1, ""))
            for other in layout.skipped if place == REFERENCE else ():
                log.compiled_calls.append(compiled._replace(module=naming.modules[other, path]))
        for index, module in enumerate(log.modules):
            place, path = layout.block_of_module.get(index, (-1, ""))
            run = source.modules[naming.modules[REFERENCE, path] if place in layout.skipped else index]
            module.calls, module.inputs, module.outputs = run.calls, run.inputs, run.outputs

    def _replay(self, stretch: Stretch, here: int) -> None:
        """The reference block's lap, as that of another block."""
        assert stretch.lap is not None
        segment = self._segments.get(stretch.lap)
        if segment is None:
            segment = self._segments[stretch.lap] = LapSegment(self.naming, stretch, self.writer.allocator)
        self.naming.start(stretch, here, self.log)
        ReplayedLap(segment, here, self.log).replay(self.writer, self._regions, take_numbers(), self._happen)

    def _write(self, stretch: Stretch, here: int | None) -> None:
        log, naming = self.log, self.naming
        if stretch.lap is not None and here is not None:
            naming.start(stretch, here, log)
            naming.born[stretch.lap, here] = []
        first = len(log.node_slots)
        if stretch.lap is None:
            naming.nodes.update(zip(stretch.nodes, range(first, first + len(stretch.nodes))))
            naming.module_calls.update((index, i) for i, index in enumerate(
                stretch.module_calls, len(log.module_call_slots)))
        log.node_slots.extend([None] * len(stretch.nodes))
        for index in stretch.module_calls:
            log.module_call_slots.append(naming.module_call(index, stretch, here))
        self._storages, self._modules_here, self._nodes_here = (naming.names(find, stretch, here) for find in (
            self._storage, naming.module, naming.node))
        for kind, what in stretch.events:
            if kind == CALLED:
                self._write_call(what, stretch, here)
            elif kind == BORN:
                self._bear(what, stretch, here)
            elif kind == DIED:
                self._free(self._storages[what])
            else:
                self._happen(kind, what, len(log.call_slots), stretch, here)
        for place, index in enumerate(stretch.nodes, first):
            log.node_slots[place] = renamed_node(self.source, index, log, self._storages, self._modules_here,
                                                 self._nodes_here)

    def _storage(self, number: int, stretch: Stretch, here: int | None) -> int:
        """The number of a storage, of which the log knows the size before its lap is written out."""
        mine = self.naming.storage(number, stretch, here)
        if mine != number and mine not in self.log.storage_table:
            life = self.source.storage_table[number]
            self.log.expect(mine, life.nbytes, life.device)
        return mine

    def _write_call(self, index: int, stretch: Stretch, here: int | None) -> None:
        call, log, storages = self.source.call_slots[index], self.log, self._storages
        self.naming.calls[index] = len(log.call_slots)
        forward = None if call.forward is None else self.naming.forward_call(call.forward, stretch, here)
        signature = call.signature
        if (insertion := self.layout.insertions.get(index)) is None:
            inputs, outputs = [storages[n] for n in call.inputs], [storages[n] for n in call.outputs]
        else:
            inputs = insert(call.inputs, list_positions(signature), insertion, self._others, storages)
            outputs = insert(call.outputs, range(len(call.outputs)), insertion, self._others, storages)
            signature = insert_specs(signature, insertion, len(self._others))
        log.call_slots.append(signature, inputs, outputs, call.step, call.phase, self._modules_here[call.module],
                              self._nodes_here[call.node], forward, call.recomputed)

    def _bear(self, what: tuple[int, int], stretch: Stretch, here: int | None) -> None:
        number, nbytes = what
        log, life, origin = self.log, self.source.storage_table[number], self.layout.storages.get(number)
        if origin is not None and here is not None and origin[:2] == (stretch.lap, stretch.block):
            born: Any = self.naming.born[origin.lap, here]
            if len(born) == origin.place:  # for the first time
                born.append(number)
                self._storages[number] = number
        mine = self._storages[number]
        device = torch.device(life.device)
        region = self.space.reserve(device, nbytes)
        self._regions[mine] = device, region
        log.events += 1
        made = log.storage_table[mine] = StorageLifetime(
            log.lifetime_table, mine, nbytes, region.bytes, region.address, life.device, log.events,
            len(log.call_slots), life.phase, life.step, self._nodes_here[life.node], self._modules_here[life.module])
        made.category, made.requires_grad, made.spec, made.label = (
            life.category, life.requires_grad, life.spec, life.label)
        self.writer.watch_peak(0)

    def _free(self, number: int) -> None:
        log, placed = self.log, self._regions.pop(number, None)
        if placed is None:
            raise Mismatch("a storage dies that was not known")
        device, region = placed
        life = log.storage_table[number]
        log.events += 1
        life.died, life.died_call = log.events, len(log.call_slots)
        self.space.give_back(device, self.writer.allocator.block_of(region) if isinstance(region, Span) else region)

    def _happen(self, kind: int, what: Any, call: int, stretch: Stretch, here: int | None) -> None:
        """What is neither a call nor a birth or death, before the call that will have the index ``call``."""
        writer = self.writer
        if kind == BEGAN:
            writer.begin(what)
        elif kind == ENDED:
            writer.end()
        elif kind == STEP:
            writer.run.step = what
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
            self._order(what, call, stretch, here)
        else:
            raise Mismatch("something that is not known happened")

    def _order(self, what: tuple[StreamAction, int, int], call: int, stretch: Stretch, here: int | None) -> None:
        action, stream, event = what
        if action is StreamAction.SWITCH:
            self.space.stream = stream
        elif action is StreamAction.RECORD:
            if here is not None and here != self.layout.run[stretch.block]:
                event = -next_number()
            if stretch.lap is not None and here is not None:
                self.naming.recorded[stretch.lap, here].append(event)
        elif event != NO_EVENT:
            event = self.naming.mark(event, stretch, here)
        self.log.streams.write(call, action, stream, event)


def run_some(recorder: Recorder, chain: RankChain, live: Iterable[MetaStorage], run: Callable[[], None],
             stands_in: bool) -> tuple[Log, AddressSpace]:
    """The log of what ``run`` does as if all blocks ran, and the memory that it leaves; with gradients of blocks that
    are not run where something ``stands_in`` for them. Raises Mismatch where it cannot be told.
    """
    log, space, reference = recorder.log, recorder.memory.space, chain.blocks[REFERENCE]
    listener, space.listener = space.listener, None
    try:  # the log and the memory as they are, and where in that memory storages are
        table = log.lifetime_table.copy()
        memo: dict[int, Any] = {id(log.lifetime_table): table}
        memo.update((id(life), life.copy_to(table)) for life in log.storage_table.values())
        memo.update((id(module), copy(module)) for module in log.modules)
        before, memory = deepcopy((log, space), memo)
        regions = {storage.number: (storage.device, deepcopy(storage.region, memo)) for storage in live}
        del memo
    finally:
        space.listener = listener
    recorder.mode.state.asks_memory = False
    counting = list_counting(chain.blocks[1:-1], chain.unread)
    with noting_slots(reference, counting) as (indices, filled):
        tape = LapTape(recorder, chain, stands_in, filled)
        with tape.running(), watch_reads(reference) as reads:
            try:
                run()
            except Mismatch:
                raise
            except Exception as error:  # of the model's own code; running all blocks shows whether it fails then, too
                raise Mismatch(f"with some of its blocks alone it fails: {first_line(error)}") from error
    unread = {place for place in chain.unread if place not in indices or indices[place].used}
    read = next(((path, name) for path, name in sorted(reads) if (path, name) in unread or (
        name == "*" and any(p == path for p, _ in chain.unread))), None)
    if read is not None:
        raise Mismatch(f"its blocks read {'.'.join(filter(None, read))}, in which they differ")
    if recorder.log.shortage is not None:
        raise Mismatch("memory ran out")
    if recorder.log.journal is not None:
        raise Mismatch("its tensors are used on other streams when they die (record_stream)")
    if any(call.cuda_graphs for call in recorder.log.compiled_calls):
        raise Mismatch(CAPTURES)
    if recorder.mode.state.asks_memory:
        raise Mismatch("a step asks how much memory is in use, or gives it back")
    try:
        return Extension(tape, before, memory, regions).write(), memory
    except torch.OutOfMemoryError as error:
        raise Mismatch("memory ran out") from error
