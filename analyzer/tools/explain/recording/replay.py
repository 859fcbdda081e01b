"""The recorded requests, run again through the simulated allocator: as they were, and under other settings."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from analyzer.memory.allocator import AllocatorOptions, Block, CachingAllocator, DeviceOutOfMemoryError
from analyzer.memory.segment_memory import PrivatePool

from .history import History
from .layout import lay_out
from .snapshot import Snapshot

_TOP_ADDRESS = 1 << 46  # below it there is room for all that a replay takes, above the addresses of a small machine
_ALIGNMENT = 2 << 20    # of segments: CachingAllocator._find_address


@dataclass(frozen=True)
class ReplayOutcome:
    """What the requests take. ``new_segments`` are their bytes in the order in which they come from the device, also
    where an expandable segment grows; ``failed_at`` is the event whose request could not be served.
    """

    peak_reserved_bytes: int
    end_reserved_bytes: int
    new_segments: list[int]
    failed_at: int | None = None


@dataclass(frozen=True)
class Fidelity:
    """How far the replay with the recorded settings, from the recorded segments on, is from what was recorded."""

    recorded: ReplayOutcome
    replayed: ReplayOutcome
    in_order: float  #: share of the recorded new segments, by bytes, that come in the same order

    @property
    def byte_error(self) -> float:
        """Of what was newly reserved; of a history that reserves nothing, 0 where the replay does not either."""
        was, found = sum(self.recorded.new_segments), sum(self.replayed.new_segments)
        return abs(found - was) / was if was else float(found > 0)


@dataclass(frozen=True)
class _RequestRow:
    """What is asked for: a block that is allocated or freed at an event, or the cache that is emptied (block -1)."""

    event: int
    block: int
    is_free: bool = False


class RequestReplay:
    """The requests of one device in their order, and the state that they start from."""

    def __init__(self, history: History, snapshot: Snapshot) -> None:
        self.history = history
        events, end = history.memory.events, len(history.memory.events)
        emptied = _find_emptied(history, snapshot)
        requests = [_RequestRow(event, block) for block, event in enumerate(history.born.tolist()) if event >= 0]
        requests += [_RequestRow(event, block, True)
                     for block, event in enumerate(history.died.tolist()) if event < end]
        requests += [_RequestRow(event, -1) for event in emptied if event - 1 not in emptied]
        self._requests = sorted(requests, key=lambda request: request.event)
        self._streams, self._pools = _find_streams(history)
        given_back = np.flatnonzero(events.of("segment_free", "segment_unmap")).tolist()
        #: what the process could reserve, where it gave segments back to serve a request
        self.recorded_limit = int(history.reserved.max(initial=0)) if set(given_back) - emptied else None

    def run(self, options: AllocatorOptions, *, from_layout: bool = False, empty_after: Collection[int] = (),
            capacity_bytes: int | None = None) -> ReplayOutcome:
        """Ask for the same again, from the recorded segments on or, by default, from blocks that are allocated anew in
        the order of their addresses. The cache is emptied after the events ``empty_after`` too.
        """
        history, top = self.history, _TOP_ADDRESS
        if from_layout:  # new segments go below those that are there, or well above where these are low
            lowest = int(min(history.memory.segments.address.min(initial=top), history.address.min(initial=top)))
            top = top if lowest < top // 2 else lowest // _ALIGNMENT * _ALIGNMENT
        allocator = CachingAllocator(capacity_bytes, options, top)
        for number, pool in self._pools.items():
            allocator.private_pools[number] = pool
            allocator.kept_streams.add(number)
        blocks: dict[int, Block] = {}
        new: list[int] = []
        reached = -1
        try:
            if from_layout:
                blocks = lay_out(allocator, history, self._streams)
            else:
                for block in history.at(-1)[np.argsort(history.address[history.at(-1)], kind="stable")].tolist():
                    blocks[block] = allocator.allocate(int(history.requested[block]), self._streams[block])
            allocator.reset_peaks()
            allocator.observer = lambda action, address, nbytes: (
                new.append(nbytes) if action in ("segment_alloc", "segment_map") else None)
            for event, block, is_free in self._list(empty_after):
                reached = event
                if block < 0:
                    allocator.empty_cache()
                elif is_free:
                    allocator.free(blocks.pop(block))
                else:
                    blocks[block] = allocator.allocate(int(history.requested[block]), self._streams[block])
        except DeviceOutOfMemoryError:
            return ReplayOutcome(allocator.peak_reserved_bytes, allocator.reserved_bytes, new, max(reached, 0))
        return ReplayOutcome(allocator.peak_reserved_bytes, allocator.reserved_bytes, new)

    def _list(self, empty_after: Collection[int]) -> Iterator[tuple[int, int, bool]]:
        waiting = sorted(empty_after, reverse=True)
        for request in self._requests:
            while waiting and waiting[-1] < request.event:
                yield waiting.pop(), -1, False
            yield request.event, request.block, request.is_free

    def check(self, options: AllocatorOptions) -> Fidelity:
        """The replay with the recorded settings against what was recorded."""
        events, history = self.history.memory.events, self.history
        taken = events.bytes[events.of("segment_alloc", "segment_map")].tolist()
        recorded = ReplayOutcome(max(history.start_reserved, int(history.reserved.max(initial=0))),
                                 history.memory.reserved_bytes, taken)
        replayed = self.run(options, from_layout=True, capacity_bytes=self.recorded_limit)
        matches = SequenceMatcher(None, recorded.new_segments, replayed.new_segments, autojunk=False)
        alike = sum(sum(recorded.new_segments[match.a:match.a + match.size])
                    for match in matches.get_matching_blocks())
        whole = sum(recorded.new_segments)
        return Fidelity(recorded, replayed, alike / whole if whole else 1.0)


def _find_emptied(history: History, snapshot: Snapshot) -> set[int]:
    """The events by which ``torch.cuda.empty_cache()`` gives segments back: its frame is in their stacks, where there
    are any. Others are given back to serve a request.
    """
    events, frames = history.memory.events, snapshot.stacks.frames
    by_name = {number for number, frame in enumerate(frames)
               if "empty_cache" in frame.name or "emptyCache" in frame.name}
    found: dict[int, bool] = {-1: True}
    emptied = set()
    for event in np.flatnonzero(events.of("segment_free", "segment_unmap")).tolist():
        stack = int(events.stack[event])
        if stack not in found:
            numbers = snapshot.stacks.number[snapshot.stacks.start[stack]:snapshot.stacks.start[stack + 1]]
            found[stack] = not by_name.isdisjoint(numbers.tolist())
        if found[stack]:
            emptied.add(event)
    return emptied


def _find_streams(history: History) -> tuple[list[int], dict[int, PrivatePool]]:
    """The stream of each block, and the private pools, whose streams have numbers of their own: that of a block is
    known from the segment at its address at the end.
    """
    segments, streams = history.memory.segments, history.stream.tolist()
    pools: dict[tuple[tuple[int, int], int], int] = {}
    private = [number for number, pool in enumerate(segments.pool) if pool != (0, 0)]
    for number in private:
        key = segments.pool[number], int(segments.stream[number])
        stand_in = pools.setdefault(key, -1 - len(pools))
        start, end = int(segments.address[number]), int(segments.address[number] + segments.bytes[number])
        for block in np.flatnonzero((history.address >= start) & (history.address < end)).tolist():
            streams[block] = stand_in
    return streams, {number: PrivatePool(pool, stream) for (pool, stream), number in pools.items()}
