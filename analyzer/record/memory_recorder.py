"""Writes down the lifetimes of storages, and what the allocator says over each phase of a step."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from analyzer.memory.allocator import Block, CachingAllocator
from analyzer.memory.host_memory import NoRegion
from analyzer.memory.segment_memory import Journal, JournalAction
from analyzer.meta.address_space import AddressSpace, MetaStorage, Region, find_storage
from analyzer.meta.spec import SPARSE_LAYOUTS, name_device, parts_of
from analyzer.meta.state import NO_EVENT, StreamAction
from analyzer.meta.tensor import PLAIN_TENSORS, is_around_tensors, names_of_parts
from analyzer.units import format_bytes

from .device_log import NO_STEP, DeviceLog, PhaseMemory, PhaseRecord, device_index
from .log import WIDE_STATES, Log
from .recorded_run import RecordedRun
from .storage_lifetime import BEGAN, BORN, DIED, ENDED, HELD, OUTSIDE, StorageLifetime
from .tensor_walk import describe, local_part, parts_of_parameter, tensors_in

BUILT = "held by the model"  #: category of what is there before the first step and no parameter, buffer or input
_FIRST_WORKSPACE = -2
ROOT = 0  #: the root's index in `Log.modules`; of what runs outside of all modules, too


class MemoryRecorder:
    """The part of a `Recorder` that hears of memory: births and deaths of storages and what they are for, and phases,
    each with what the allocators said at its end. ``claim`` is the device that is watched; ``log`` is a new one where
    none is given.
    """

    def __init__(self, space: AddressSpace, claim: torch.device, log: Log | None = None) -> None:
        self.space = space
        self.allocator = space.memory(claim)
        self.log = log or Log(device=str(claim))
        #: of several devices the memories of those beside the watched one, each with its part of the log
        self.others = self._list_others(claim)
        self.run = RecordedRun(self.log)
        self.block = ""  #: of a script: the outermost block with a name that it is in
        #: categories that are kept until more is known of a storage
        self.undecided: Collection[str] = ("",)
        self.after_backward: str | None = None  #: the phase that follows a backward pass, whatever is resumed then

    def _list_others(self, claim: torch.device) -> list[tuple[CachingAllocator, DeviceLog]]:
        indices = range(self.space.devices) if self.space.devices > 1 and claim.type != "cpu" else ()
        logs = [DeviceLog(str(torch.device(claim.type, index))) for index in indices if index != claim.index]
        self.log.others = {log.device: log for log in logs}
        return [(self.space.allocator(device_index(log.device)), log) for log in logs]

    # ---- phases

    def begin(self, phase: str) -> None:
        """A stretch of ``phase`` begins; what ran before has ended."""
        self.end()
        if self.run.events is not None:
            self.run.events.append((BEGAN, phase))
        self.run.phase = phase
        for memory in (self.allocator, self.space.host, *(memory for memory, _ in self.others)):
            memory.begin_lap()
        self.log.phases.append(PhaseRecord(self.run.step, phase, len(self.log.call_slots), last_call=-1,
                                           block=self.block))

    def end(self) -> None:
        if not self.log.phases or self.log.phases[-1].last_call >= 0:
            return
        if self.run.events is not None:
            self.run.events.append((ENDED, None))
        record = self.log.phases[-1]
        record.last_call = len(self.log.call_slots)
        record.end_event, record.end_allocator_event = self.log.events, len(self.log.allocator_events)
        record.read(self.allocator)
        host = self.space.host
        record.host_allocated_bytes, record.host_peak_bytes = host.allocated_bytes, host.lap_peaks()[0]
        for memory, log in self.others:
            record.others[log.device] = other = PhaseMemory()
            other.read(memory)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Run a block in ``phase``, then go back to the phase before. Nested blocks of a phase are one."""
        before = self.run.phase
        if before == phase:
            yield
            return
        self.begin(phase)
        try:
            yield
        finally:
            self.resume(before)

    def resume(self, phase: str) -> None:
        """What ran has ended; a stretch of ``phase`` begins with the next operator, if one comes."""
        self.end()
        if self.after_backward is not None and self.run.phase == "backward":
            phase = self.after_backward
        self.run.phase = phase

    # ---- storages (StorageListener)

    def born(self, storage: MetaStorage) -> None:
        log, run = self.log, self.run
        log.events += 1
        if run.events is not None:
            run.events.append((BORN, storage.number))
        region, stack = storage.region, run.stack
        log.storages[storage.number] = StorageLifetime(
            log.lifetime_table, storage.number, storage.nbytes() if region.bytes else 0,  # none of a zero tensor
            region.bytes, region.address, name_device(storage.device), log.events, len(log.call_slots.signatures),
            run.phase, run.step, run.node, stack[-1] if stack else ROOT)
        self.watch_peak(0)

    def died(self, number: int) -> None:
        log = self.log
        log.events += 1
        if self.run.events is not None:
            self.run.events.append((DIED, number))
        lifetime = log.storages.get(number)
        if lifetime is not None:
            lifetime.die(log.events, len(log.call_slots.signatures))

    def register_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write down the storages of tensors that were there before the run."""
        for tensor in tensors:
            if tensor.layout in SPARSE_LAYOUTS:
                self.register_existing(parts_of(tensor))
            elif tensor.layout is torch.strided and not is_lazy(tensor):
                parts = [tensor] if type(tensor) in PLAIN_TENSORS else [part for *_, part in parts_of_parameter(tensor)]
                for part in parts:
                    storage = self.storage_of(part)
                    if storage is not None and storage.number not in self.log.storages:
                        self.born(storage)
        if self.log.peak_bytes == self.allocator.allocated_bytes:
            self.log.peak_event = self.log.events  # now that all of it is in the log

    def resized(self, before: int, storage: MetaStorage) -> None:
        """The storage just born, or the same in its block, is that of the number ``before``: a buffer stays one."""
        old, new = self.log.storages.get(before), self.log.storages.get(storage.number)
        if old is not None and new is not None and old.category == "buffer":
            new.category, new.label, new.module, new.node = old.category, old.label, old.module, old.node
            new.nbytes = storage.nbytes()

    def adopted(self, storage: MetaStorage) -> None:
        """The storage just born stands for a tensor that was there before the steps, such as a constant of a loss."""
        self.log.storages[storage.number].step = NO_STEP

    def watch_peak(self, workspace_bytes: int) -> None:
        """Note what is allocated where it is more than before; ``workspace_bytes`` of it are a kernel's that runs."""
        allocated = self.allocator.allocated_bytes
        if allocated > self.log.peak_bytes:
            log = self.log
            log.peak_bytes, log.peak_event, log.peak_workspace_bytes = allocated, log.events, workspace_bytes
        for memory, other in self.others:
            if memory.allocated_bytes > other.peak_bytes:  # where the kernel does not run nothing has grown
                other.peak_bytes, other.peak_event = memory.allocated_bytes, self.log.events
                other.peak_workspace_bytes = workspace_bytes

    def observe_memory(self) -> None:
        """Write down every event of the allocator from here on, and as events what it holds already."""
        allocator_events = self.log.allocator_events
        self.log.keeps_allocator_events = True
        for memory, log in [(self.allocator, self.log), *self.others]:
            if not isinstance(memory, CachingAllocator):
                continue
            log.memory_at_start = memory.copy()[0]
            for spans in memory.mapped_ranges():
                allocator_events.append("segment_alloc" if spans[0].segment.page_bytes is None else "segment_map",
                                        spans[0].address, sum([span.size_bytes for span in spans]), 0)
                live = [span for span in spans if span.requested_bytes is not None]
                allocator_events.extend("alloc", [span.address for span in live], [span.size_bytes for span in live], 0)
        self.log.events_at_start = len(allocator_events)
        self.keep_allocator_events()

    def keep_allocator_events(self) -> None:
        events, calls = self.log.allocator_events, self.log.call_slots
        for memory in (self.allocator, *(memory for memory, _ in self.others)):  # whose addresses are their own
            memory.observer = lambda action, address, nbytes: events.append(action, address, nbytes, len(calls))

    def let_go(self) -> None:
        """Hear no more of memory."""
        for memory in (self.allocator, *(memory for memory, _ in self.others)):
            memory.observer = None
            if isinstance(memory, CachingAllocator):
                memory.journal = None

    def watch_fullest(self) -> None:
        """Watch the device that decides, now that the run has ended: where memory ran out, else the fullest."""
        log = self.log
        if log.shortage is not None:
            log.watch(log.shortage.device or log.device)
            return
        peaks = {log.device: (max([r.peak_reserved_bytes or 0 for r in log.phases], default=0), log.peak_bytes)}
        for device, other in log.others.items():
            reserved = max([r.others[device].peak_reserved_bytes or 0 for r in log.phases], default=0)
            peaks[device] = reserved, other.peak_bytes
        log.watch(max(log.devices, key=peaks.__getitem__))

    # ---- workspaces (CallListener)

    def took_workspace(self, nbytes: int, claim: torch.device, blocks: tuple[int, ...],
                       elsewhere: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> None:
        """The allocator just gave a workspace of ``nbytes`` for ``blocks``, which its kernel gives back at once; on
        other devices, by their names, its blocks are those of ``elsewhere``.
        """
        self.log.events += bool(blocks)
        if self.run.events is not None:
            self.run.events.append((HELD, (claim, blocks, elsewhere)))
        self.watch_peak(nbytes)

    def holds_workspace(self, storage: MetaStorage) -> None:
        """The storage just born is an operator's temporary, which dies when the operator ends."""
        self.log.storages[storage.number].category = "workspace"

    def kept_workspace(self, region: Region, nbytes: int, claim: torch.device, label: str,
                       elsewhere: Mapping[str, int] = MappingProxyType({})) -> None:
        """A library just took a workspace that it keeps for as long as the process lives; of other devices, by their
        names, ``elsewhere`` has its bytes.
        """
        log = self.log
        log.events += 1
        number = self._free_number()
        lifetime = log.storages[number] = StorageLifetime(
            log.lifetime_table, number, nbytes, region.bytes, region.address, str(claim), log.events,
            len(log.call_slots), self.run.phase, self.run.step, OUTSIDE, ROOT)
        lifetime.category, lifetime.label = "workspace", label
        if elsewhere:
            self.run.kept_elsewhere[number] = elsewhere
        for listener in self.run.listeners:
            listener.kept(number)
        self.watch_peak(0)

    def freed_workspace(self, region: Region) -> None:
        """A library gave back a workspace that it had kept."""
        for listener in self.run.listeners:
            listener.gave_back()
        log = self.log
        log.events += 1
        for number in range(_FIRST_WORKSPACE, self._free_number(), -1):
            lifetime = log.storages[number]
            if lifetime.address == region.address and lifetime.died is None:
                lifetime.died, lifetime.died_call = log.events, len(log.call_slots)

    def _free_number(self) -> int:
        """The first number that no workspace has; they count down, and storages from 0 up."""
        return next(number for number in count(_FIRST_WORKSPACE, -1) if number not in self.log.storages)

    # ---- streams (CallListener)

    def ordered(self, action: StreamAction, stream: int, event: int) -> None:
        for listener in self.run.listeners:
            listener.ordered(action, stream, event)
        self.log.streams.write(len(self.log.call_slots), action, stream, event)

    def used_on(self, storage: MetaStorage, stream: int) -> None:
        """A storage may be used on a stream when it dies: from the first one on, the log has a journal of memory."""
        region, log = storage.region, self.log
        if isinstance(region, NoRegion) and self.space.current_stream(storage.device.index or 0) != stream:
            self.ordered(StreamAction.USE, stream, NO_EVENT)  # no allocator has placed it yet
        if not isinstance(region, Block) or region.stream == stream:
            return
        memory = self.space.memory(storage.device)
        own = log if memory is self.allocator else next((own for other, own in self.others if other is memory), None)
        if own is None or not isinstance(memory, CachingAllocator):
            return
        self.ordered(StreamAction.USE, stream, NO_EVENT)
        if own.journal is None:
            own.journal_start = memory.copy()[0]
            own.journal = memory.journal = Journal(
                lambda: (len(log.call_slots), len(log.streams), self.run.step), memory.capacity_bytes)
        own.journal.note(JournalAction.USE, region.address, stream=stream)

    # ---- what storages are for

    def storage_of(self, tensor: torch.Tensor) -> MetaStorage | None:
        """The storage of a strided tensor; None for one that is not in the books."""
        storage = find_storage(tensor)
        return storage if type(storage) is MetaStorage else None

    def mark(self, tensors: Any, category: str, label: str = "", undecided: Collection[str] = ()) -> None:
        """Put the storages of ``tensors`` that have no category yet, or one that is `undecided`, into ``category``."""
        lifetimes = self.log.storages
        for tensor in tensors:
            if is_around_tensors(tensor):
                self.mark([getattr(tensor, name) for name in names_of_parts(tensor)], category, label, undecided)
            elif tensor.layout in SPARSE_LAYOUTS:
                self.mark(parts_of(tensor), category, label, undecided)
            elif tensor.layout is torch.strided:
                storage = self.storage_of(tensor)
                lifetime = None if storage is None else lifetimes.get(storage.number)
                if lifetime is not None and lifetime.category in (undecided or self.undecided):
                    lifetime.category, lifetime.label = category, label
                    lifetime.requires_grad = tensor.requires_grad
                    lifetime.spec = describe(tensor) if category == "input" else None

    def mark_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark an optimizer's states, also those of one inside it, as `ZeroRedundancyOptimizer` has."""
        for keeper in (optimizer, getattr(optimizer, "optim", None)):
            self.mark_built(tensors_in(list(getattr(keeper, "state", {}).values())), "optimizer state")

    def describe_wide_states(self, optimizer: torch.optim.Optimizer) -> str | None:
        """A sentence on states as large as their parameter in elements, and wider; None where there are none."""
        wide: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameter, state
        for parameter, states in getattr(optimizer, "state", {}).items():
            if isinstance(parameter, torch.Tensor) and isinstance(states, dict):
                wide += [(parameter, one) for one in states.values() if isinstance(one, torch.Tensor)
                         and one.shape == parameter.shape and one.element_size() > parameter.element_size()]
        if not wide:
            return None
        parameter, state = wide[0]
        storage = self.storage_of(local_part(state))
        lifetime = None if storage is None else self.log.storages.get(storage.number)
        line = None if lifetime is None else self.log.find_line(lifetime)
        now, narrow = sum([one.nbytes for _, one in wide]), sum([one.numel() * p.element_size() for p, one in wide])
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (state, parameter)]
        return (f"{WIDE_STATES} {type(optimizer).__name__} keeps {kinds[0]} for parameters in {kinds[1]}"
                f"{'' if line is None else f', made at {line}'}: {format_bytes(now)}, which would be "
                f"{format_bytes(narrow)} in {kinds[1]}")

    def mark_built(self, tensors: Any, category: str) -> None:
        """As `mark`, also of what was there before the first step."""
        self.mark(tensors, category, undecided=(*self.undecided, BUILT))
