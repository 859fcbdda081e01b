"""Memory over time, and what is known about a step that ran out of it."""
from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from analyzer.meta.address_space import find_device_index
from analyzer.profilers.held_memory import category_of, forward_ends
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.record.device_log import device_index
from analyzer.record.log import Log, Shortage
from analyzer.record.storage_lifetime import AllocatorEvent, StorageLifetime

from .info import FirstShortage, MemoryEvent, OutOfMemoryInfo, TimelinePoint
from .tree import ModulePaths

PHASES = ("forward", "backward", "optimizer", "zero_grad")  #: of a step, in order
# In which phase a quantity is complete; those of the whole step never are in a step that was not finished.
_BORN_IN_FORWARD = ("accumulate_bytes", "incremental_bytes", "output_bytes", "temp_bytes", "backward_bytes",
                    "activation_bytes", "saved_bytes")
_WHOLE_STEP = ("step_seconds", "kernel_seconds")


def describe_shortage(log: Log, paths: ModulePaths) -> OutOfMemoryInfo | None:
    """Where the run ended for want of memory, None where it did not."""
    return None if log.shortage is None else OutOfMemoryInfo(**_describe(log, paths, log.shortage))


def describe_first_shortage(log: Log, paths: ModulePaths) -> FirstShortage | None:
    """Where the run would have ended on the device, None where it would not."""
    short = log.first_shortage
    return None if short is None else FirstShortage(**_describe(log, paths, short), source=short.source)


def _describe(log: Log, paths: ModulePaths, short: Shortage) -> dict[str, Any]:
    return {"operator": short.operator, "phase": short.phase, "step": short.step,
            "node": log.nodes[short.node].name if short.node >= 0 else None,
            "module_path": paths.find(log.modules[short.module].path) or None,
            **{name: getattr(short, name) for name in (
                "requested_bytes", "short_bytes", "allocated_bytes", "reserved_bytes", "capacity_bytes")}}


def list_finished_phases(log: Log) -> tuple[str, ...]:
    """The finished phases of the log's last step, which is the last whole one where there is one."""
    short = log.shortage
    if short is None or short.step:
        return PHASES
    return PHASES[:PHASES.index(short.phase)] if short.phase in PHASES else ()


def find_unfinished(log: Log) -> Callable[[str], bool] | None:
    """Tells of a quantity whether the run ended before it was complete; None where all are complete."""
    finished = list_finished_phases(log)
    if finished is PHASES:
        return None
    def is_unfinished(name: str) -> bool:
        phase = "optimizer" if name.startswith("optimizer_") else "zero_grad"
        if name.startswith("fwd_") or name in _BORN_IN_FORWARD:
            phase = "forward"
        elif name.startswith(("bwd_", "recompute_")) or name in ("executed_flops", "saved_tensors"):
            phase = "backward"
        return name in _WHOLE_STEP or phase not in (*finished, "zero_grad")

    return is_unfinished


Span = tuple[int, int]


def read_memory(log: Log, host_starts: Mapping[int, int]) -> tuple[tuple[TimelinePoint, ...], tuple[MemoryEvent, ...]]:
    """The timeline and the memory events of the last step that reaches the run's peak, up to the end of the run;
    ``host_starts`` is as in `Lanes`. What is there when that step begins comes first, as events without a point.
    Replayed, the events give the allocated and reserved bytes at every point, and their highest is ``log.peak_bytes``.
    Both are empty where the log keeps no events of the allocator.
    """
    if not log.phases:
        return (), ()
    # after it comes what the end of the run frees
    end = log.phases[-1].end_allocator_event if log.shortage is None else log.shortage.allocator_event
    changes = [*log.allocator_events[:end]]  # of all devices
    if log.allocator_events and log.device == "cpu":  # an allocator tells itself of what was there before
        made = {change[1] for change in log.allocator_events if change[0] == "alloc"}  # no address is used twice
        changes[:0] = [("alloc", lifetime.address, lifetime.block_bytes, 0) for lifetime in log.storages.values()
                       if lifetime.device == log.device and lifetime.block_bytes and lifetime.address not in made]
    if not changes:
        return (), ()
    reaching = [record.step for record in log.phases if record.peak_allocated_bytes == log.peak_bytes]
    first_call = next((record.first_call for record in log.phases if reaching and record.step == max(reaching)), 0)
    start = next((i for i, change in enumerate(changes) if change[3] >= first_call), len(changes))
    owners = _find_owners(log, changes)
    names = _Requesters(log)
    events = list(_state_after(changes[:start], owners, names))
    points = tuple(_points(log, _leave_out_others(log, changes), start, first_call, len(events) - start, host_starts))
    events += [names.describe(change, owners.get(i)) for i, change in enumerate(changes[start:], start)]
    return points, tuple(events)


def find_peak_call(log: Log) -> tuple[int, int] | None:
    """The call in which most is allocated, of the steps that `read_memory` shows, and how much; None of several devices
    and of the host, and where a log keeps no events or ended for want of memory.
    """
    events = log.allocator_events
    if not log.phases or log.others or log.device == "cpu" or log.shortage is not None or not len(events):
        return None
    changes, calls = events.read_changes(log.phases[-1].end_allocator_event)
    reaching = [record.step for record in log.phases if record.peak_allocated_bytes == log.peak_bytes]
    first_call = next((record.first_call for record in log.phases if reaching and record.step == max(reaching)), 0)
    later = np.nonzero(calls >= first_call)[0]
    start = int(later[0]) if len(later) else len(calls)
    while start < len(calls) and calls[start] == first_call and changes[start] < 0:
        start += 1  # freed by what ran before that step
    totals = np.cumsum(np.concatenate([[changes[:start].sum()], changes[start:]]))
    place = int(np.argmax(totals))
    call = first_call if place == 0 else max(first_call, int(calls[start:start + place].max()))
    return (call, int(totals[place])) if call < len(log.calls) else None


def _leave_out_others(log: Log, changes: list[AllocatorEvent]) -> list[AllocatorEvent]:
    """The events, of which those on other devices than the watched one change nothing."""
    if not log.others:
        return changes
    own = device_index(log.device)
    return [change if find_device_index(change[1]) == own else (change[0], change[1], 0, change[3])
            for change in changes]


def _find_owners(log: Log, changes: list[AllocatorEvent]) -> dict[int, StorageLifetime]:
    """The storage behind each allocation, by its index; an allocation without one is a workspace."""
    lifetimes: defaultdict[tuple[int, int, int], list[StorageLifetime]] = defaultdict(list)
    for lifetime in sorted(log.storages.values(), key=lambda lifetime: lifetime.born):
        if lifetime.device == log.device or lifetime.device in log.others:
            lifetimes[lifetime.address, lifetime.block_bytes, lifetime.born_call].append(lifetime)
    owners: dict[int, StorageLifetime] = {}
    open_changes: dict[int, int] = {}  # address -> change that allocated it
    for i in reversed(range(len(changes))):  # a workspace of the same place and call comes before the storage
        action, address, nbytes, call = changes[i]
        if action == "alloc" and (found := lifetimes.get((address, nbytes, call))):
            owners[i] = found.pop()
    for i, (action, address, _, _) in enumerate(changes):
        if action == "alloc":
            open_changes[address] = i
        elif action == "free" and (allocated := open_changes.pop(address, -1)) in owners:
            owners[i] = owners[allocated]
    return owners


class _Requesters:
    """Who asked for memory, and what for; found once for each storage and operator."""

    def __init__(self, log: Log) -> None:
        self.log, self.ends = log, forward_ends(log)
        self._find_device = find_device_index if log.others else lambda address: 0
        self._of_storage: dict[int, tuple[str, str]] = {}
        self._operator = functools.cache(str)

    def describe(self, change: AllocatorEvent, lifetime: StorageLifetime | None) -> MemoryEvent:
        action, address, nbytes, call = change
        device = self._find_device(address)
        if action != "alloc" and action != "free":
            return MemoryEvent(action, address, nbytes, device=device)
        if lifetime is None:
            return MemoryEvent(action, address, nbytes, self._find_operator(call), "workspace", device)
        found = self._of_storage.get(lifetime.number)
        if found is None:
            name = lifetime.label or (self.log.nodes[lifetime.node].name if lifetime.node >= 0 else self.log.lines.get(
                lifetime.born_call) or self._find_operator(lifetime.born_call))
            found = self._of_storage[lifetime.number] = name, category_of(lifetime, self.log, self.ends)
        return MemoryEvent(action, address, nbytes, *found, device, lifetime.nbytes)

    def _find_operator(self, call: int) -> str:
        return self._operator(self.log.calls[call].signature.op) if call < len(self.log.calls) else ""


def _state_after(changes: list[AllocatorEvent], owners: dict[int, StorageLifetime],
                 names: _Requesters) -> Iterator[MemoryEvent]:
    """What the events leave: segments, then blocks, by address."""
    blocks: dict[int, int] = {}
    segments: dict[int, int] = {}
    pages: list[Span] = []
    for i, (action, address, nbytes, _) in enumerate(changes):
        if action == "alloc":
            blocks[address] = i
        elif action == "free":
            blocks.pop(address, None)
        elif action == "segment_alloc":
            segments[address] = nbytes
        elif action == "segment_free":
            segments.pop(address, None)
        else:
            pages = change_pages(pages, action, address, nbytes)
    yield from (names.describe(("segment_alloc", address, nbytes, 0), None)
                for address, nbytes in sorted(segments.items()))
    yield from (names.describe(("segment_map", start, end - start, 0), None) for start, end in pages)
    yield from (names.describe(changes[i], owners.get(i)) for _, i in sorted(blocks.items()))


def change_pages(pages: Iterable[Span], action: str, address: int, nbytes: int) -> list[Span]:
    """The mapped spans of expandable segments, in order and disjoint, after a ``segment_map`` or ``segment_unmap``."""
    start, end = address, address + nbytes
    if action == "segment_unmap":
        cut = [part for s, e in pages for part in ((s, min(e, start)), (max(s, end), e))]
        return [(s, e) for s, e in cut if s < e]
    return join_spans([*pages, (start, end)])


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """The same addresses as disjoint spans in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _points(log: Log, changes: list[AllocatorEvent], start: int, first_call: int, shift: int,
            host_starts: Mapping[int, int]) -> Iterator[TimelinePoint]:
    """One point per call that changed what is in use, one more before it where it was higher while the call ran."""
    allocated = reserved = 0
    named = functools.cache(str)
    has_segments, seconds = log.device != "cpu", {call: start / PICOSECONDS for call, start in host_starts.items()}
    for change in changes[:start]:
        allocated, reserved = _apply(change, allocated, reserved)
    i = start
    shown = None
    while i < len(changes) and changes[i][3] == first_call and changes[i][0] == "free":
        allocated, reserved = _apply(changes[i], allocated, reserved)  # by what ran before that step
        i += 1
    for index in range(first_call, len(log.calls)):
        peak = allocated, reserved, -i  # of equal ones the first
        while i < len(changes) and changes[i][3] <= index:
            allocated, reserved = _apply(changes[i], allocated, reserved)
            i += 1
            peak = max(peak, (allocated, reserved, -i))
        if (allocated, reserved) == shown == peak[:2]:
            continue
        shown = allocated, reserved
        call = log.calls[index]
        operator = named(call.signature.op)
        label = log.nodes[call.node].name if call.node >= 0 else operator
        for used, held, event in [peak, (*shown, -i)] if peak[:2] != shown else [(*shown, -i)]:
            yield TimelinePoint(label, used, call.phase, held if has_segments else None, shift - event,
                                seconds.get(index), operator)
    if i < len(changes):  # what happened after the last call
        for change in changes[i:]:
            allocated, reserved = _apply(change, allocated, reserved)
        phase = log.phases[-1].phase if log.phases else None
        yield TimelinePoint("end" if log.shortage is None else "out of memory", allocated, phase,
                            reserved if has_segments else None, shift + len(changes), seconds.get(len(log.calls)))


def _apply(change: AllocatorEvent, allocated: int, reserved: int) -> tuple[int, int]:
    action, _, nbytes, _ = change
    if action == "alloc":
        return allocated + nbytes, reserved
    if action == "free":
        return allocated - nbytes, reserved
    return allocated, reserved + (nbytes if action in ("segment_alloc", "segment_map") else -nbytes)


def list_inputs(log: Log) -> list[StorageLifetime]:
    """The inputs of the last step: not those that a script gave to passes before it or after it, such as a rollout."""
    records = [record for record in log.phases if record.step == log.steps - 1]
    start, stop = min([r.first_call for r in records], default=0), max([r.last_call for r in records], default=0)
    given = [lifetime for lifetime in log.lifetimes_in("input") if lifetime.spec is not None]
    own = [one for one in given if one.born_call < stop and (one.died_call is None or one.died_call >= start)]
    if any([start <= one.born_call for one in own]):  # of what a script kept, only what the step reads
        own = [one for one in own if one.born_call >= start
               or any(log.call_slots.read_any(start, stop, [one.number]))]
    return own or given
