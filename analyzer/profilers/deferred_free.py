"""Memory that no storage holds: workspaces inferred of measured steps, what is made to time kernels, blocks whose free
waits for a stream.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from analyzer.cuda.workspaces.convolution import Inferred, list_inferred
from analyzer.cuda.workspaces.recurrent import list_recurrent
from analyzer.hardware import DeviceSpec
from analyzer.hardware.catalogue import simulating
from analyzer.hardware.kernel_time.generated import TILED
from analyzer.memory.allocator import Block, CachingAllocator
from analyzer.memory.segment_memory import JournalAction
from analyzer.meta.address_space import STREAMS_A_DEVICE, find_device_index
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Signature
from analyzer.meta.state import EVERY_STREAM, StreamAction, StreamMark
from analyzer.record.device_log import device_index, find_place
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import AllocatorEvent

from .host_time import waits_for_device

# What rests on workspaces that are in no source: the peaks of memory without those of cuDNN's convolutions and
# recurrent layers, and with the most that they could be.
#
# What the allocator did is asked of another one again, with other workspaces; where blocks lie follows from that.
# Reserved bytes need not grow with the workspaces: a large one that is free again holds what would else take a segment
# of its own.

_ROUNDED_BYTES = 2**20  # a block is at most so much larger than what it was asked for
_Choose = Callable[[Inferred], int]


class Peaks(NamedTuple):
    """Peaks of memory; ``reserved_bytes`` is None where the run's own placement could not be repeated."""

    allocated_bytes: int
    reserved_bytes: int | None


class InferredPeaks(NamedTuple):
    """Peaks of a run, without the inferred workspaces, and with the most that they could be."""

    predicted: Peaks
    least: Peaks
    most: Peaks

    def range_of(self, name: str) -> tuple[int, int] | None:
        """Low and high of one of the fields of `Peaks`; None where that is not known."""
        ends = [getattr(peaks, name) for peaks in self]
        return None if None in ends else (min(ends), max(ends))

    def describe(self) -> str | None:
        """How many bytes rest on them, as an assumption; None where none do."""
        if self.least == self.predicted:
            return None
        allocated = self.predicted.allocated_bytes - self.least.allocated_bytes
        text = ("cuDNN: workspaces of convolutions and recurrent layers are in no source and inferred from measured "
                f"steps. {allocated:,} bytes of peak_allocated_bytes rest on them, ")
        if self.least.reserved_bytes is None or self.predicted.reserved_bytes is None:
            return f"{text}of peak_reserved_bytes an unknown part"
        rest = self.predicted.reserved_bytes - self.least.reserved_bytes
        more = f" (without them {-rest:,} more would be reserved)" if rest < 0 else ""
        return f"{text}{max(0, rest):,} of peak_reserved_bytes{more}"


def _list_workspaces(signature: Signature) -> tuple[Inferred, ...]:
    return list_inferred(signature) or list_recurrent(signature)


def has_inferred(log: Log, spec: DeviceSpec) -> bool:
    """Whether a call of the log has a workspace that is inferred."""
    if log.memory_at_start is None or log.shortage is not None or spec.kind != "cuda":
        return False
    with simulating(spec):
        return any(any(workspace) for signature in log.signatures() if _runs_there(log, signature)
                   for workspace in _list_workspaces(signature))


def _runs_there(log: Log, signature: Signature) -> bool:
    """Whether a call runs on the watched one of several devices."""
    return not log.others or any(spec.device == log.device for spec in (*signature.outputs, *signature.inputs))


def find_inferred_peaks(log: Log, spec: DeviceSpec, predicted: Peaks) -> InferredPeaks:
    """What becomes of the peaks of a log that `has_inferred`."""
    assert log.memory_at_start is not None
    events = log.allocator_events[log.events_at_start:log.phases[-1].end_allocator_event]
    if log.others:
        events = [event for event in events if find_device_index(event[1]) == device_index(log.device)]
    calls: dict[int, list[Inferred]] = {}
    with simulating(spec):
        for i, signature in enumerate(log.call_slots.signatures):
            if signature is not None and _runs_there(log, signature) and (
                    known := [w for w in _list_workspaces(signature) if any(w)]):
                calls[i] = known
    made: dict[int, int] = {}
    freed_at: dict[int, int] = {}  # for each allocation, by its number, the call in which it is given back
    for number, (action, address, _, call) in enumerate(events):
        if action == "alloc":
            made[address] = number
        elif action == "free" and address in made:
            freed_at[made.pop(address)] = call
    again, least, most = (_RepeatedRequests(log.memory_at_start, calls, choose).run(events, freed_at) for choose in (
        lambda known: known.nbytes, lambda known: 0, lambda known: known.most_bytes))
    if again.reserved_bytes != predicted.reserved_bytes:  # memory was given back, or taken on several streams
        least, most = (peaks._replace(reserved_bytes=None) for peaks in (least, most))
    return InferredPeaks(predicted, least, most)


class _RepeatedRequests:
    """A run's allocations once more, with the workspaces of ``calls`` as chosen: each in place of that of the run, or
    when its call ends. Other blocks keep their bytes of the run, as placement would add up to 1 MiB to each.
    """

    def __init__(self, start: CachingAllocator, calls: dict[int, list[Inferred]], choose: _Choose) -> None:
        self.memory, self.live = start.copy()
        self.choose = choose
        self.missing = {i: list(known) for i, known in calls.items()}
        self.allocated_bytes = self.peak_bytes = self.memory.allocated_bytes
        self.sizes = {address: block.bytes for address, block in self.live.items()}

    def run(self, events: Sequence[AllocatorEvent], freed_at: Mapping[int, int]) -> Peaks:
        """The peaks over all events, of which each allocation is given back in the call ``freed_at`` says."""
        waiting = deque(sorted(self.missing))
        for number, (action, address, nbytes, call) in enumerate(events):
            while waiting and waiting[0] < call:
                self._hold_missing(waiting.popleft())
            if action == "alloc":
                missing = self.missing.get(call, []) if freed_at.get(number) == call else []
                found = next((w for w in missing if 0 < w.nbytes <= nbytes < w.nbytes + _ROUNDED_BYTES), None)
                if found is not None:  # the workspace of this call
                    missing.remove(found)
                self._take(address, nbytes if found is None else self.choose(found), nbytes if found is None else None)
            elif action == "free" and address in self.sizes:
                self._give_back(address)
        for call in waiting:
            self._hold_missing(call)
        return Peaks(self.peak_bytes, self.memory.peak_reserved_bytes)

    def _hold_missing(self, call: int) -> None:
        for workspace in self.missing.pop(call):
            if size := self.choose(workspace):
                self._take(-1, size, None)
                self._give_back(-1)

    def _take(self, address: int, size: int, block_bytes: int | None) -> None:
        if size:
            self.live[address] = self.memory.allocate(size)
            self.sizes[address] = self.memory.rounded_bytes(size) if block_bytes is None else block_bytes
            self.allocated_bytes += self.sizes[address]
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _give_back(self, address: int) -> None:
        self.memory.free(self.live.pop(address))
        self.allocated_bytes -= self.sizes.pop(address)


# What TorchInductor makes to time the kernels that it has several configurations of, which by default are those without
# a sum, when they run first: copies of the tensors that they write in place, and one that is written between runs so
# that no cache holds their inputs (torch/_inductor/runtime/triton_heuristics.py, `clone_args`; triton/testing.py,
# `do_bench`; `InductorBenchmarker` writes as much as the L2 cache holds, and may copy to the host). Kernels that an
# earlier process made are read from the disk with their configuration, and not timed.

_CLEARED_BYTES = 256 * 2**20


class TimedPeaks(NamedTuple):
    """The peaks of a run, and what was allocated at most while a kernel was timed, and which that is."""

    predicted: Peaks
    timed_bytes: int
    kernel: str

    def range_of(self, name: str) -> tuple[int, int] | None:
        """Low and high of one of the fields of `Peaks`; None where timing takes no more than the step."""
        low, more = getattr(self.predicted, name), self.timed_bytes - self.predicted.allocated_bytes
        return None if low is None or more <= 0 else (low, low + more)

    def describe(self) -> str | None:
        if self.timed_bytes <= self.predicted.allocated_bytes:
            return None
        return (f"torch.compile: kernels are assumed to be compiled already. A first step that compiles them times "
                f"them on copies of what they write in place, with {_CLEARED_BYTES >> 20} MiB more to empty the cache: "
                f"for {self.kernel} {self.timed_bytes:,} bytes are allocated")


def times_kernels(log: Log) -> bool:
    """Whether a kernel that Triton makes may run in several ways."""
    return any(_is_timed(signature.op) for signature in log.signatures())


def _is_timed(op: Any) -> bool:
    if not (isinstance(op, FusedKernel) and op.name.startswith("poi_")):
        return False
    # tiles of one tensor that is read and one that is written have one shape: ``select_tile_hint`` of
    # torch/_inductor/codegen/triton_utils.py
    return op.kind != TILED or len(op.read_bytes) + len(op.written_bytes) > 2


def find_timed_peaks(log: Log, predicted: Peaks) -> TimedPeaks:
    """What is allocated while the kernels of a log that `times_kernels` run first."""
    first: dict[Any, int] = {}
    for index, call in enumerate(log.calls):
        if call.step == 0 and _is_timed(call.signature.op):
            first.setdefault(call.signature.op, index)
    places = list(first.values())
    changes = [0] * (len(places) + 1)
    for lifetime in log.storages.values():
        if lifetime.device == log.device:
            start, died = bisect_left(places, lifetime.born_call), lifetime.died_call
            stop = len(places) if died is None else bisect_right(places, died)
            changes[start] += lifetime.block_bytes
            changes[max(start, stop)] -= lifetime.block_bytes
    found = (0, "")
    for (op, index), held in zip(first.items(), accumulate(changes)):
        call = log.calls[index]
        copied = sum([log.storages[number].block_bytes for number in call.outputs
                      if number in call.inputs or log.storages[number].born_call < index])
        found = max(found, (held + copied + _CLEARED_BYTES, op.name))
    return TimedPeaks(predicted, *found)


# Memory that ``record_stream`` holds back: blocks which return to their pool when other streams have caught up.
#
# Source: ``free``, ``insert_events`` and ``process_events`` in c10/cuda/CUDACachingAllocator.cpp. A block that is freed
# while other streams may use it gets an event on each of these, which the allocator polls before it allocates. How far
# the device is then depends on its speed. Two bounds hold on any device: each block is free at once, or not before the
# host knows that it is, since it waited for something that comes after.

class HeldBack(NamedTuple):
    """What holding blocks back to the last would do: their number, the most bytes of them, and the most reserved, no
    more than there is: where memory is short, the allocator waits for the streams (`release_cached_blocks`).
    """

    blocks: int
    peak_bytes: int
    peak_reserved_bytes: int


def hold_back(log: Log) -> HeldBack | None:
    """The upper bound; None where the program never called ``record_stream``. The host waits at the end of a step."""
    if log.journal is None or log.journal_start is None:
        return None
    return _Replay(log, log.journal_start).run()


class _HostKnowledge:
    """What the host knows to be done on each stream, by the order of events: what comes before an event on its stream,
    and before what that had waited for. Time is the number of what was asked for.
    """

    def __init__(self) -> None:
        self.now = 0
        self._floors: defaultdict[int, int] = defaultdict(int)  # of every stream of a device, by its index
        self._known: dict[int, int] = {}
        self._reached: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by stream, what it waited for of others
        self._events: dict[int, dict[int, int]] = {}

    def ask(self, mark: StreamMark) -> bool:
        """The program asks something of a stream; whether the host knows more then."""
        self.now += 1
        action, stream = mark.action, mark.stream
        if action is StreamAction.RECORD:
            self._events[mark.event] = {**self._reached[stream], stream: self.now}
        elif action is StreamAction.WAIT:
            _raise_to(self._reached[stream], self._events.get(mark.event, {}))
        elif action is StreamAction.SYNCHRONIZE and mark.event:
            _raise_to(self._known, self._events.get(mark.event, {}))
        elif action is StreamAction.SYNCHRONIZE:
            self.wait_for(stream)
        return action is StreamAction.SYNCHRONIZE

    def wait_for(self, stream: int) -> None:
        """The host waits for all that a stream, or each of a device, was given."""
        if stream < 0:
            self._floors[EVERY_STREAM - stream] = self.now
        else:
            _raise_to(self._known, {**self._reached[stream], stream: self.now})

    def is_done(self, streams: dict[int, int]) -> bool:
        """Whether each stream has come to a time, as far as the host knows."""
        return all(max(self._floors[stream // STREAMS_A_DEVICE], self._known.get(stream, 0)) >= time
                   for stream, time in streams.items())


def _raise_to(times: dict[int, int], others: dict[int, int]) -> None:
    for stream, time in others.items():
        times[stream] = max(times.get(stream, 0), time)


class _Replay:
    """The journal asked of an allocator that gets blocks back when the host knows that it may."""

    def __init__(self, log: Log, start: CachingAllocator) -> None:
        self.log = log
        self.memory, self.live = start.copy()
        self.host = _HostKnowledge()
        self._device = device_index(log.device) if log.others else 0
        self._marks = self._calls = 0  # how many were passed
        self._step = 0
        self._uses: defaultdict[int, set[int]] = defaultdict(set)  # streams, by address
        self._held: list[tuple[Block, dict[int, int]]] = []
        self._held_bytes = 0

    def run(self) -> HeldBack:
        assert self.log.journal is not None
        blocks = peak_bytes = 0
        for action, (calls, marks, step), address, nbytes, stream in self.log.journal.entries:
            self._pass(calls, marks, step)
            if action is JournalAction.ALLOCATE:
                self.live[address] = self.memory.allocate(nbytes, stream)
            elif action is JournalAction.USE:
                self._uses[address].add(stream)
            elif action is JournalAction.EMPTY:  # release_cached_blocks: synchronize_and_free_events
                self.host.wait_for(EVERY_STREAM - self._device)
                self._give_back()
                self.memory.empty_cache()
            elif streams := self._uses.pop(address, None):
                self.host.now += 1
                self._held.append((self.live.pop(address), dict.fromkeys(streams, self.host.now)))
                blocks, self._held_bytes = blocks + 1, self._held_bytes + self._held[-1][0].bytes
                peak_bytes = max(peak_bytes, self._held_bytes)
            else:
                self.memory.free(self.live.pop(address))
        peak = self.memory.peak_reserved_bytes
        limit = self.log.journal.limit_bytes if self.log.first_shortage is None else None
        return HeldBack(blocks, peak_bytes, peak if limit is None else min(peak, limit))

    def _pass(self, calls: int, marks: int, step: int) -> None:
        """Go on to where so many calls and requests of streams have been made; the host waits between steps."""
        for mark in self.log.streams.marks[self._marks:marks]:
            self._pass_calls(mark.call)
            if self.host.ask(mark):
                self._give_back()
        self._marks = max(self._marks, marks)
        self._pass_calls(calls)
        if step != self._step:
            self._step = step
            for device in range(len(self.log.devices)):
                self.host.wait_for(EVERY_STREAM - device)
            self._give_back()

    def _pass_calls(self, calls: int) -> None:
        """The host waits for calls that read back what they computed."""
        signatures = self.log.call_slots.signatures
        for index in range(self._calls, min(calls, len(signatures))):
            signature = signatures[index]
            if signature is not None and waits_for_device(signature):
                self.host.now += 1
                self.host.wait_for(self.log.streams.stream_at(index, find_place(signature) if self.log.others else 0))
                self._give_back()
        self._calls = max(self._calls, calls)

    def _give_back(self) -> None:
        held, self._held = self._held, []
        for block, streams in held:
            if self.host.is_done(streams):
                self._held_bytes -= block.bytes
                self.memory.free(block)
            else:
                self._held.append((block, streams))
