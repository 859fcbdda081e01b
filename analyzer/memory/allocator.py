"""A simulation of PyTorch's CUDA caching allocator: addresses, allocated and reserved bytes, out-of-memory.

Source of every rule: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.11 to 2.13);
comments name the function. Private pools of CUDA graphs are streams of their own (`kept_streams`). Blocks that
``record_stream`` names are free at once here; a `journal` can be replayed with later frees.

Vocabulary: a *segment* is what one ``cudaMalloc`` returns, or the address range of one expandable segment; it is a
chain of *spans*, live, free or (expandable segments only) unmapped; a *block* is the caller's handle on a live span.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from analyzer.errors import AnalyzerError, InputError

from .allocator_options import MIB, MIN_BLOCK_BYTES, AllocatorOptions
from .allocator_segment import (
    Elsewhere,
    Instruction,
    Placements,
    Pool,
    Segment,
    Span,
    replay_best_fit,
    replay_one_by_one,
)
from .segment_memory import DEFAULT_POOL, Journal, JournalAction, PrivatePool, SegmentMemory

__all__ = ["AllocatorOptions", "Block", "CachingAllocator", "DeviceOutOfMemoryError"]

_PYTORCH_DEFAULTS = AllocatorOptions()


class DeviceOutOfMemoryError(AnalyzerError, MemoryError, torch.OutOfMemoryError):
    """The simulated device has no memory left for an allocation: code that catches ``torch.cuda.OutOfMemoryError``, or
    looks for "out of memory" in the text of a RuntimeError, meets what it waits for. Attributes are bytes:
    ``requested_bytes`` asked for; ``short_bytes`` missing once all cached segments were given back; ``allocated_bytes``
    and ``reserved_bytes`` at that moment; ``capacity_bytes`` that may be reserved in all. ``device`` is the name of the
    device, of several.
    """

    def __init__(self, requested_bytes: int, short_bytes: int, allocated_bytes: int, reserved_bytes: int,
                 capacity_bytes: int, device: str | None = None) -> None:
        unused_bytes, where = reserved_bytes - allocated_bytes, "" if device is None else f" on {device}"
        super().__init__(
            f"CUDA out of memory. Tried to allocate {requested_bytes:,} bytes{where}, {short_bytes:,} bytes short; of "
            f"{capacity_bytes:,} bytes {allocated_bytes:,} are allocated and {unused_bytes:,} reserved but unused. "
            + ("Fragmentation is the cause; expandable_segments:True avoids most of it" if unused_bytes >= short_bytes
               else "Try a smaller batch, activation checkpointing or a device with more memory"))
        self.requested_bytes, self.short_bytes, self.capacity_bytes = requested_bytes, short_bytes, capacity_bytes
        self.allocated_bytes, self.reserved_bytes = allocated_bytes, reserved_bytes
        self.device = device

    def __reduce__(self) -> tuple[type[DeviceOutOfMemoryError], tuple[Any, ...]]:
        return type(self), (self.requested_bytes, self.short_bytes, self.allocated_bytes, self.reserved_bytes,
                            self.capacity_bytes, self.device)


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """Device memory handed out by ``CachingAllocator.allocate``; its fields stay as they are after ``free``."""

    address: int
    requested_bytes: int
    bytes: int  #: allocated, rounding and unsplit remainder included
    stream: int
    _span: Span | None  # None once freed

    def __repr__(self) -> str:
        state = "free" if self._span is None else "live"
        return (f"Block({self.address:#x}, requested_bytes={self.requested_bytes}, bytes={self.bytes}, "
                f"stream={self.stream}, {state})")


class CachingAllocator(SegmentMemory):
    """The caching allocator of one CUDA device; sizes and addresses only, no memory. ``capacity_bytes`` is what
    ``cudaMalloc`` can hand out in all; None: without limit. Segments lie below ``top_address`` (a multiple of 512), in
    ranges of 32 MiB each below the one before; the address decides which of several free blocks of one size is taken.
    Addresses of segments given back are not used again. ``total_bytes`` tells what the device has, of which a
    fraction is a share, by default the capacity. Not safe for use from several threads at once.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(1)
    >>> block.bytes, allocator.allocated_bytes, allocator.reserved_bytes
    (512, 512, 2097152)
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        options: AllocatorOptions = _PYTORCH_DEFAULTS,
        top_address: int = 0x7000_0000_0000,  # among the 47-bit user addresses where CUDA puts device memory on Linux
        total_bytes: Callable[[], int | None] | None = None,
        counts: bool = False,
    ) -> None:
        super().__init__(capacity_bytes, options, top_address, total_bytes)
        self.device: str | None = None  #: its name among several
        #: told of every block from here on, and each then is one, not the `Span` of a replay
        self.journal: Journal | None = None
        #: whether blocks are counted one by one, which code can ask for; sequences repeated at once never are
        self.counts = counts
        self.stats.is_partial = not counts
        self._rounds_to_divisions = options.divisions_by_interval is not None
        self._next_empty_address = top_address
        # Empty blocks own nothing, but free() must tell a live one from a freed one.
        self._empty_span = Segment(0, 0, Pool(self, options, 0, is_small=True), None).head
        self.allocated_bytes = 0  #: of all live blocks, rounding included: ``torch.cuda.memory_allocated``
        self.requested_bytes = 0  #: what the callers of all live blocks asked for
        # since the last reset of either kind; the floors hold what was reached before it
        self._peak_allocated_bytes = self._peak_requested_bytes = 0
        self._peak_floors = self._lap_floors = (0, 0, 0)

    @property
    def alloc_retry_count(self) -> int:
        """Times that the whole cache had to be given back before an allocation was retried: ``num_alloc_retries``."""
        return self.stats.retry_count

    @property
    def _is_best_fit(self) -> bool:
        """Whether best fit, split and merge are all there is to it: what `replay_best_fit` knows."""
        return not (self._collects_garbage or self.options.expandable_segments or self._max_split_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most of `allocated_bytes` since `reset_peaks`."""
        return max(self._peak_floors[0], self._peak_allocated_bytes)

    @property
    def peak_requested_bytes(self) -> int:
        """The most of `requested_bytes` since `reset_peaks`."""
        return max(self._peak_floors[1], self._peak_requested_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most of `reserved_bytes` since `reset_peaks`."""
        return max(self._peak_floors[2], self._peak_reserved_bytes)

    @property
    def fragmented_bytes(self) -> int:
        """Free bytes that ``empty_cache`` could not give back, since live blocks share their segment (or page). Without
        expandable segments this is PyTorch's ``inactive_split_bytes``; with them PyTorch reports 0.
        """
        fragmented_bytes = 0
        for pool in self._pools():
            for span in pool.free:
                if pool.page_bytes is not None:
                    start, end = span.segment.whole_pages(span)
                    fragmented_bytes += span.size_bytes - max(0, end - start)
                elif span.is_split:
                    fragmented_bytes += span.size_bytes
        return fragmented_bytes

    def reset_peaks(self) -> None:
        """Set the peaks to the current values: ``torch.cuda.reset_peak_memory_stats``."""
        self._lap_floors = self.lap_peaks()
        self._peak_floors = (0, 0, 0)
        self._lower_peaks()
        self.stats.reset_peaks()

    def count(self) -> dict[str, Any]:
        """What ``torch.cuda.memory_stats`` tells, as `AllocatorStats.to_dict`. Blocks are counted from now on; of what
        was before, and of sequences that were repeated at once, only what is there now and the peaks of all.
        """
        self.counts = True
        if self.stats.is_partial:
            self.stats.recount(span for spans in self.mapped_ranges() for span in spans)
        found = self.stats.to_dict()
        for name, peak_bytes in (("allocated_bytes", self.peak_allocated_bytes),
                                 ("requested_bytes", self.peak_requested_bytes),
                                 ("reserved_bytes", self.peak_reserved_bytes)):
            found[name]["all"]["peak"] = peak_bytes
        return found

    def begin_lap(self) -> None:
        """Begin a lap with peaks of its own, `lap_peaks`; `reset_peaks` leaves them as they are."""
        self._peak_floors = (self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_reserved_bytes)
        self._lap_floors = (0, 0, 0)
        self._lower_peaks()

    def lap_peaks(self) -> tuple[int, int, int]:
        """Allocated, requested and reserved peaks since `begin_lap`."""
        allocated, requested, reserved = self._lap_floors
        return (max(allocated, self._peak_allocated_bytes), max(requested, self._peak_requested_bytes),
                max(reserved, self._peak_reserved_bytes))

    def _lower_peaks(self) -> None:
        self._peak_allocated_bytes = self.allocated_bytes
        self._peak_requested_bytes = self.requested_bytes
        self._peak_reserved_bytes = self.reserved_bytes

    # malloc
    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Memory of ``nbytes`` for use on ``stream``. Zero bytes give a block of 0 bytes with an address of its own.
        Raises InputError for a negative size, DeviceOutOfMemoryError where PyTorch would run out of memory.
        """
        if nbytes < 0:
            raise InputError(f"nbytes={nbytes!r}: must not be negative")
        if nbytes == 0:  # PyTorch gives a null pointer; addresses above all segments keep these blocks apart as well
            self._next_empty_address += MIN_BLOCK_BYTES
            return Block(self._next_empty_address, 0, 0, stream, self._empty_span)
        # round_size; without divisions to the next multiple of kMinBlockSize
        if self._rounds_to_divisions:
            size_bytes = self.options.rounded_bytes(nbytes)
        else:
            size_bytes = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self.pool(stream, size_bytes)
        index = self._find_free(pool, size_bytes)
        if index < 0:
            index = self.add_new(pool, size_bytes, nbytes)
        span = self.stats.take(pool, index, size_bytes, nbytes) if self.counts else pool.take(index, size_bytes)
        size_bytes = span.size_bytes
        span.requested_bytes = nbytes
        self.allocated_bytes += size_bytes
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self.allocated_bytes)
        self.requested_bytes += nbytes
        self._peak_requested_bytes = max(self._peak_requested_bytes, self.requested_bytes)
        if self.observer is not None:
            self.observer("alloc", span.address, size_bytes)
        if self.journal is not None:
            self.journal.note(JournalAction.ALLOCATE, span.address, nbytes, stream)
        return Block(span.address, nbytes, size_bytes, stream, span)

    def place(self, nbytes: int, stream: int = 0) -> Block:
        """Memory as `allocate` gives it for what a CUDA graph holds as it is replayed: the block keeps others from its
        place, and counts as no byte, since PyTorch asks no allocator for it then.
        """
        usage, observer = self.usage, self.observer
        if observer is not None:
            self.observer = lambda action, *where: None if action == "alloc" else observer(action, *where)
        try:
            block = self.allocate(nbytes, stream)
        finally:
            self.usage, self.observer = usage, observer
            self.stats.is_partial = True
        return Block(block.address, 0, 0, stream, block._span)

    # free_block
    def free(self, block: Block) -> None:
        """Return ``block`` to the cache. Raises InputError if it is free already or came from another allocator."""
        span = block._span
        if span is None:
            raise InputError(f"{block!r} is freed a second time; free each block once")
        pool = span.segment.pool
        if pool.owner is not self:
            raise InputError(f"{block!r} came from another allocator; free it there")
        block._span = None
        if span is self._empty_span:
            return
        self.allocated_bytes -= block.bytes
        self.requested_bytes -= block.requested_bytes
        if self.observer is not None and block.bytes:
            self.observer("free", block.address, block.bytes)
        if self.journal is not None:
            self.journal.note(JournalAction.FREE, block.address)
        span.requested_bytes = None
        kept = self.stats.give_back(span, block.requested_bytes) if self.counts else pool.give_back(span)
        kept.freed_at = self._large_searches

    def rounded_bytes(self, nbytes: int) -> int:
        """The size of the block that a request gets where none is left unsplit; 0 for an empty one."""
        return self.options.rounded_bytes(nbytes) if nbytes else 0

    def block_of(self, place: Block | Span, stream: int = 0) -> Block:
        if isinstance(place, Block):
            return place
        assert place.requested_bytes is not None
        return Block(place.address, place.requested_bytes, place.size_bytes, stream, place)

    def place_of(self, block: Block) -> Block | Span:
        """What `replay` takes in a slot for a live block, to free it: the handle is of no use after that."""
        span = block._span
        assert span is not None
        return span if self._is_best_fit else block

    def replay(self, instructions: Iterable[Instruction], slots: list[Any], placements: Placements,
               elsewhere: Elsewhere | None = None, stream: int = 0) -> None:
        """Repeat `allocate` and `free`; a slot then holds what `block_of` takes, and ``placements`` tell the rest."""
        before, self.observer = self.observer, placements.observe
        try:
            if self._is_best_fit and self.journal is None:
                self.stats.is_partial = True
                replay_best_fit(self, instructions, slots, placements, elsewhere, stream)
            else:
                replay_one_by_one(self, instructions, slots, placements, elsewhere, 0, stream)
        finally:
            self.observer = before

    @property
    def usage(self) -> tuple[int, int, int, int]:
        """Bytes allocated, their peak, bytes requested and their peak: what a replay keeps count of."""
        return (self.allocated_bytes, self._peak_allocated_bytes, self.requested_bytes, self._peak_requested_bytes)

    @usage.setter
    def usage(self, usage: tuple[int, int, int, int]) -> None:
        (self.allocated_bytes, self._peak_allocated_bytes, self.requested_bytes, self._peak_requested_bytes) = usage

    def empty_cache(self) -> None:
        """Give every segment without a live block (of expandable ones, every such page) back to the device."""
        self._release_cached()
        if self.journal is not None:
            self.journal.note(JournalAction.EMPTY)

    def copy(self, is_limited: bool = False) -> tuple[CachingAllocator, dict[int, Block]]:
        """An allocator in the same state, and its live blocks by address; without a limit unless it ``is_limited``."""
        options = self.options if is_limited else replace(
            self.options, per_process_memory_fraction=1.0, garbage_collection_threshold=0.0)
        copy = CachingAllocator(self.capacity_bytes if is_limited else None, options, self._lowest_address)
        copy._gaps = {room_bytes: list(addresses) for room_bytes, addresses in self._gaps.items()}
        copy._large_searches, copy._next_empty_address = self._large_searches, self._next_empty_address
        if is_limited:
            copy._allowed_bytes = self._allowed_bytes
        copy.kept_streams, copy.private_pools = set(self.kept_streams), dict(self.private_pools)
        copy.reserved_bytes, copy.usage = self.reserved_bytes, self.usage
        blocks = {}
        for span in copy.take_segments(self._segments.values()):
            size_bytes, requested_bytes = span.size_bytes, span.requested_bytes
            assert requested_bytes is not None
            blocks[span.address] = Block(span.address, requested_bytes, size_bytes, span.segment.pool.stream, span)
        copy.reset_peaks()
        return copy, blocks

    def snapshot(self, device: int = 0) -> list[dict[str, Any]]:
        """The state of all segments, by address, in the form of ``torch.cuda.memory_snapshot``. An expandable segment
        appears as one entry per contiguous mapped range. ``frames`` are empty, and the ``requested_size`` of inactive
        blocks is 0. Source: ``segmentInfoToDict`` in ``torch/csrc/cuda/memory_snapshot.cpp``.
        """
        found: list[dict[str, Any]] = []
        for spans in self.mapped_ranges():
            segment, live = spans[0].segment, [span for span in spans if span.requested_bytes is not None]
            live_bytes = sum(span.size_bytes for span in live)
            stream = segment.pool.stream
            private = self.private_pools.get(stream, PrivatePool(DEFAULT_POOL, stream))
            found.append({
                "device": device, "address": spans[0].address, "total_size": sum(span.size_bytes for span in spans),
                "allocated_size": live_bytes, "active_size": live_bytes,
                "requested_size": sum(span.requested_bytes or 0 for span in live), "stream": private.stream,
                "segment_type": "small" if segment.pool.is_small else "large", "segment_pool_id": private.id,
                "is_expandable": segment.page_bytes is not None, "frames": [],
                "blocks": [{"address": span.address, "size": span.size_bytes, "frames": [],
                            "requested_size": span.requested_bytes or 0,
                            "state": "inactive" if span.requested_bytes is None else "active_allocated"}
                           for span in spans]})
        return found

    # get_free_block
    def _find_free(self, pool: Pool, size_bytes: int) -> int:
        if self._collects_garbage and not pool.is_small:
            self._large_searches += 1
        free = pool.free
        index = pool.find(size_bytes)
        if index == len(free):
            return -1
        if pool.page_bytes is not None:
            # best fit by the size that a span could grow to, not by what it has now
            while index + 1 < len(free) and _expandable_bytes(free[index + 1]) < _expandable_bytes(free[index]):
                index += 1
        if self._max_split_bytes is not None:
            found_bytes = free[index].size_bytes
            if size_bytes < self._max_split_bytes <= found_bytes:
                return -1
            rounding_bytes = (self.options.max_non_split_rounding_mb or self.options.large_segment_size_mb) * MIB
            if size_bytes >= self._max_split_bytes and found_bytes >= size_bytes + rounding_bytes:
                return -1
        return index

    # malloc, where no free block was found
    def add_new(self, pool: Pool, size_bytes: int, nbytes: int) -> int:
        """Bring a span of at least ``size_bytes`` from the device into the pool; its place in ``pool.free``."""
        if self._collects_garbage:
            self._collect_garbage()
        span = self.reserve(pool, size_bytes)
        if span is not None:
            return pool.insert(span)
        # With throw_on_cudamalloc_oom a request beyond the fraction fails before anything is given back (PR 179473).
        if not (self.options.throw_on_cudamalloc_oom and self._excess_bytes(size_bytes) > 0):
            if self._release_oversize(pool, size_bytes):
                span = self.reserve(pool, size_bytes)
            if span is None and not self.is_diverted:
                self._release_cached()
                self.stats.retry_count += 1
                span = self.reserve(pool, size_bytes)
        else:
            self.stats.rejection_count += 1
        if span is None:
            self.stats.failure_count += 1
            limits = [limit for limit in (self._allowed_bytes, self.capacity_bytes) if limit is not None]
            span = self.outgrow(pool, size_bytes, DeviceOutOfMemoryError(
                nbytes, self._short_bytes, self.allocated_bytes, self.reserved_bytes, min(limits), self.device))
        return pool.insert(span)


def _expandable_bytes(span: Span) -> int:
    after = span.next
    return span.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)
