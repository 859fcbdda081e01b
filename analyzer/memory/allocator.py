"""A simulation of PyTorch's CUDA caching allocator: addresses, allocated and reserved bytes, out-of-memory.

Source of every rule: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.11 to 2.13);
comments name the function. Not simulated: private pools (CUDA graphs, ``torch.cuda.MemPool``) and the delay of frees by
``record_stream``, which depends on when kernels end.

Vocabulary: a *segment* is what one ``cudaMalloc`` returns, or the address range of one expandable segment; it is a
chain of *spans*, live, free or (expandable segments only) unmapped; a *block* is the caller's handle on a live span.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import torch

from analyzer.errors import AnalyzerError, InputError

from .allocator_options import ADDRESS_RANGE_BYTES, LARGE_ROUNDING_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorOptions
from .allocator_play import Elsewhere, Takings, play_plainly
from .allocator_segment import ADDRESS_BITS, Pool, Segment, Span
from .allocator_snapshot import SegmentSnapshot, mapped_ranges, snapshot_segments

__all__ = ["AllocatorOptions", "Block", "CachingAllocator", "DeviceOutOfMemoryError", "SegmentSnapshot"]

# Without a capacity the address range of an expandable segment has no natural size; requests above it get a larger one.
_UNBOUNDED_RANGE_BYTES = 1 << 40

_PYTORCH_DEFAULTS = AllocatorOptions()


class DeviceOutOfMemoryError(AnalyzerError, MemoryError, torch.OutOfMemoryError):
    """The simulated device has no memory left for an allocation: code that catches ``torch.cuda.OutOfMemoryError``, or
    looks for "out of memory" in the text of a RuntimeError, meets what it waits for. All attributes are bytes.

    ``requested_bytes`` asked for; ``short_bytes`` missing once all cached segments were given back; ``allocated_bytes``
    and ``reserved_bytes`` at that moment; ``capacity_bytes`` that may be reserved in all.
    """

    def __init__(
        self, requested_bytes: int, short_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        unused_bytes = reserved_bytes - allocated_bytes
        super().__init__(
            f"CUDA out of memory. Tried to allocate {requested_bytes:,} bytes, {short_bytes:,} bytes short; of "
            f"{capacity_bytes:,} bytes {allocated_bytes:,} are allocated and {unused_bytes:,} reserved but unused. "
            + ("Fragmentation is the cause; expandable_segments:True avoids most of it" if unused_bytes >= short_bytes
               else "Try a smaller batch, activation checkpointing or a device with more memory")
        )
        self.requested_bytes = requested_bytes
        self.short_bytes = short_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes

    def __reduce__(self) -> tuple[type[DeviceOutOfMemoryError], tuple[int, ...]]:
        return type(self), (self.requested_bytes, self.short_bytes, self.allocated_bytes, self.reserved_bytes,
                            self.capacity_bytes)


class Block:
    """Device memory handed out by ``CachingAllocator.allocate``; its fields stay as they are after ``free``."""

    __slots__ = ("_span", "address", "bytes", "requested_bytes", "stream")

    address: int
    requested_bytes: int
    bytes: int  #: allocated, rounding and unsplit remainder included
    stream: int
    _span: Span | None  # None once freed

    def __init__(self, address: int, requested_bytes: int, nbytes: int, stream: int, span: Span) -> None:
        self.address = address
        self.requested_bytes = requested_bytes
        self.bytes = nbytes
        self.stream = stream
        self._span = span

    def __repr__(self) -> str:
        state = "free" if self._span is None else "live"
        return f"Block({self.address:#x}, requested_bytes={self.requested_bytes}, bytes={self.bytes}, stream={self.stream}, {state})"


class CachingAllocator:
    """The caching allocator of one CUDA device; sizes and addresses only, no memory.

    ``capacity_bytes`` is what ``cudaMalloc`` can hand out in all; None: without limit. Segments lie below
    ``top_address`` (a multiple of 512), in ranges of 32 MiB each below the one before; the address decides which of
    several free blocks of one size is taken. Addresses of segments given back are not used again. Not safe for use from
    several threads at once.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(1)
    >>> block.bytes, allocator.allocated_bytes, allocator.reserved_bytes
    (512, 512, 2097152)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_allocated_bytes
    (0, 2097152, 512)
    >>> allocator.empty_cache()
    >>> allocator.reserved_bytes
    0
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        options: AllocatorOptions = _PYTORCH_DEFAULTS,
        top_address: int = 0x7000_0000_0000,  # among the 47-bit user addresses where CUDA puts device memory on Linux
    ) -> None:
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise InputError(f"capacity_bytes={capacity_bytes!r}: must be positive, or None for no limit")
        if top_address <= 0 or top_address % MIN_BLOCK_BYTES:
            raise InputError(f"top_address={top_address!r}: must be a positive multiple of {MIN_BLOCK_BYTES}")
        self.capacity_bytes = capacity_bytes
        self.options = options
        #: told of every act: (action, address, bytes), with the action names of ``torch.cuda.memory._snapshot``'s
        #: traces
        self.observer: Callable[[str, int, int], None] | None = None
        #: times that the whole cache had to be given back before an allocation was retried (``num_alloc_retries``)
        self.alloc_retry_count = 0
        # setMemoryFraction: the limit that the allocator itself keeps, beside what the device has
        self._allowed_bytes: int | None = None
        if options.per_process_memory_fraction < 1.0:
            if capacity_bytes is None:
                raise InputError(
                    f"per_process_memory_fraction={options.per_process_memory_fraction!r}: a share of no known size; give capacity_bytes"
                )
            self._allowed_bytes = int(options.per_process_memory_fraction * capacity_bytes)
        # malloc: idle segments are collected only where a fraction was set
        self._collects_garbage = self._allowed_bytes is not None and options.garbage_collection_threshold > 0.0
        self._rounds_to_divisions = options.divisions_by_interval is not None
        self._max_split_bytes = options.max_split_bytes
        # Best fit, split and merge are all there is to it: what the loop of `play` knows.
        self._is_plain = not (self._collects_garbage or options.expandable_segments) and self._max_split_bytes is None
        self._small_pools: dict[int, Pool] = {}
        self._large_pools: dict[int, Pool] = {}
        self._segments: dict[int, Segment] = {}
        self._spare: list[Span] = []  # merged into others: `_play` would take longer to make new ones
        self._lowest_address = self._next_empty_address = top_address
        # heaps of the addresses left over in ranges, by how many bytes there are from there
        self._gaps: dict[int, list[int]] = {}
        # Empty blocks own nothing, but free() must tell a live one from a freed one.
        self._empty_span = Segment(0, 0, Pool(self, options, 0, is_small=True), None).head
        self._large_searches = 0  # get_free_blocks_call_count of the large pool
        self._short_bytes = 0  # by how much the device last refused
        self._allocated_bytes = self._requested_bytes = self._reserved_bytes = 0
        # since the last reset of either kind; the floors hold what was reached before it
        self._peak_allocated_bytes = self._peak_requested_bytes = self._peak_reserved_bytes = 0
        self._peak_floors = self._lap_floors = (0, 0, 0)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live blocks, rounding included: ``torch.cuda.memory_allocated``."""
        return self._allocated_bytes

    @property
    def requested_bytes(self) -> int:
        """Bytes that the callers of all live blocks asked for."""
        return self._requested_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device, live or cached: ``torch.cuda.memory_reserved``."""
        return self._reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        return max(self._peak_floors[0], self._peak_allocated_bytes)

    @property
    def peak_requested_bytes(self) -> int:
        return max(self._peak_floors[1], self._peak_requested_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        return max(self._peak_floors[2], self._peak_reserved_bytes)

    @property
    def fragmented_bytes(self) -> int:
        """Free bytes that ``empty_cache`` could not give back, since live blocks share their segment (or page).

        Without expandable segments this is PyTorch's ``inactive_split_bytes``; with them PyTorch reports 0.
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

    @property
    def fragmentation(self) -> float:
        """``fragmented_bytes`` as a share of ``reserved_bytes``, from 0 to 1."""
        return self.fragmented_bytes / self._reserved_bytes if self._reserved_bytes else 0.0

    def reset_peaks(self) -> None:
        """Set the peaks to the current values: ``torch.cuda.reset_peak_memory_stats``."""
        self._lap_floors = self.lap_peaks()
        self._peak_floors = (0, 0, 0)
        self._lower_peaks()

    def begin_lap(self) -> None:
        """Begin a stretch with peaks of its own, `lap_peaks`, whoever resets the others meanwhile."""
        self._peak_floors = (self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_reserved_bytes)
        self._lap_floors = (0, 0, 0)
        self._lower_peaks()

    def lap_peaks(self) -> tuple[int, int, int]:
        """Allocated, requested and reserved peaks since `begin_lap`."""
        allocated, requested, reserved = self._lap_floors
        return (max(allocated, self._peak_allocated_bytes), max(
            requested, self._peak_requested_bytes), max(reserved, self._peak_reserved_bytes))

    def _lower_peaks(self) -> None:
        self._peak_allocated_bytes = self._allocated_bytes
        self._peak_requested_bytes = self._requested_bytes
        self._peak_reserved_bytes = self._reserved_bytes

    # malloc
    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Memory of ``nbytes`` for use on ``stream``. Zero bytes give a block of 0 bytes with an address of its own.

        Raises InputError for a negative size, DeviceOutOfMemoryError where PyTorch would run out of memory.
        """
        if nbytes <= 0:
            return self._allocate_empty(nbytes, stream)
        # round_size; without divisions to the next multiple of kMinBlockSize
        if self._rounds_to_divisions:
            size_bytes = self.options.rounded_bytes(nbytes)
        else:
            size_bytes = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = (self._small_pools if size_bytes <= SMALL_BYTES else self._large_pools).get(stream) or self._make_pool(
            stream, size_bytes)
        span = self._take_free(pool, size_bytes) or self._take_new(pool, size_bytes, nbytes)

        # alloc_found_block: the block keeps the low end
        if span.size_bytes - size_bytes >= pool.min_remainder_bytes and size_bytes < pool.split_below_bytes:
            pool.insert(span.split(size_bytes))
        else:
            size_bytes = span.size_bytes
        span.requested_bytes = nbytes
        self._allocated_bytes += size_bytes
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self._allocated_bytes)
        self._requested_bytes += nbytes
        self._peak_requested_bytes = max(self._peak_requested_bytes, self._requested_bytes)
        if self.observer is not None:
            self.observer("alloc", span.address, size_bytes)
        return Block(span.address, nbytes, size_bytes, stream, span)

    # free_block, try_merge_blocks
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
        self._allocated_bytes -= block.bytes
        self._requested_bytes -= block.requested_bytes
        if self.observer is not None:
            self.observer("free", block.address, block.bytes)
        span.requested_bytes = None
        span = self._merge_free_neighbours(span)
        span.freed_at = self._large_searches
        pool.insert(span)

    def rounded_bytes(self, nbytes: int) -> int:
        """The size of the block that a request gets where none is left unsplit; 0 for an empty one."""
        return self.options.rounded_bytes(nbytes) if nbytes else 0

    def block_of(self, place: Block | Span, stream: int = 0) -> Block:
        """The handle on what `play` left in a slot."""
        if isinstance(place, Block):
            return place
        assert place.requested_bytes is not None
        return Block(place.address, place.requested_bytes, place.size_bytes, stream, place)

    def place_of(self, block: Block) -> Block | Span:
        """What `play` takes in a slot for a live block, to free it: the handle is of no use after that."""
        span = block._span
        assert span is not None
        return span if self._is_plain else block

    def play(self, acts: list[Any], slots: list[Any], takings: Takings, elsewhere: Elsewhere, stream: int = 0) -> None:
        """Repeat a sequence of `allocate` and `free` (see `allocator_play`); the same as these one by one.

        A slot then holds what `block_of` takes. The observer hears of nothing: ``takings`` tell it all.
        """
        before, self.observer = self.observer, takings.observe
        try:
            if self._is_plain:
                self._play(acts, slots, takings, elsewhere, stream)
            else:
                play_plainly(self, acts, slots, takings, elsewhere, stream)
        finally:
            self.observer = before

    def _play(self, acts: list[Any], slots: list[Any], takings: Takings, elsewhere: Elsewhere, stream: int) -> None:
        small = self._small_pools.get(stream) or self._make_pool(stream, 0)
        large = self._large_pools.get(stream) or self._make_pool(stream, SMALL_BYTES + 1)
        remainder_bytes = large.min_remainder_bytes
        addresses, top_bytes, spare = takings.addresses, takings.top_bytes, self._spare
        allocated, peak, requested, requested_peak = (
            self._allocated_bytes, self._peak_allocated_bytes, self._requested_bytes, self._peak_requested_bytes)
        for at, act in enumerate(acts):
            if type(act) is int:  # free
                span = slots[act]
                size = span.size_bytes
                allocated -= size
                requested -= span.requested_bytes
                span.requested_bytes = None
                pool = span.segment.pool
                keys, free = pool.keys, pool.free
                right, left = span.next, span.prev
                index = -1  # of the neighbour that it grows into
                if right is not None and right.requested_bytes is None:
                    index = bisect_left(keys, right.size_bytes << ADDRESS_BITS | right.address)
                    size += right.size_bytes
                    spare.append(right)
                    span.next = after = right.next
                    if after is not None:
                        after.prev = span
                if left is not None and left.requested_bytes is None:
                    if index >= 0:
                        del keys[index], free[index]
                    index = bisect_left(keys, left.size_bytes << ADDRESS_BITS | left.address)
                    size += left.size_bytes
                    spare.append(span)
                    left.next = after = span.next
                    if after is not None:
                        after.prev = left
                    span = left
                span.size_bytes = size
                key = size << ADDRESS_BITS | span.address
                if index >= 0:
                    if index + 1 == len(keys) or key < keys[index + 1]:  # it keeps its neighbour's place in the order
                        keys[index], free[index] = key, span
                        continue
                    del keys[index], free[index]
                index = bisect_left(keys, key)
                keys.insert(index, key)
                free.insert(index, span)
                continue
            fields = len(act)
            if fields == 3:  # allocate
                slot, size, nbytes = act
                if size <= SMALL_BYTES:
                    pool, least_bytes = small, MIN_BLOCK_BYTES
                else:
                    pool, least_bytes = large, remainder_bytes
                keys, free = pool.keys, pool.free
                index = bisect_left(keys, size << ADDRESS_BITS)
                was_free = index < len(keys)
                if was_free:
                    span = free[index]
                else:
                    self._allocated_bytes, self._requested_bytes = allocated, requested  # what an error tells
                    span = self._take_new(pool, size, nbytes)
                rest = span.size_bytes - size
                if rest >= least_bytes:
                    address = span.address
                    if spare:
                        right = spare.pop()
                        right.address, right.size_bytes, right.segment = address + size, rest, span.segment
                    else:
                        right = Span(address + size, rest, span.segment)
                    right.prev = span
                    right.next = after = span.next
                    if after is not None:
                        after.prev = right
                    span.next = right
                    span.size_bytes = size
                    key = rest << ADDRESS_BITS | address + size
                    if was_free and (not index or keys[index - 1] < key):  # what is left keeps the place in the order
                        keys[index], free[index] = key, right
                    else:
                        if was_free:
                            del keys[index], free[index]
                        index = bisect_left(keys, key)
                        keys.insert(index, key)
                        free.insert(index, right)
                else:
                    if was_free:
                        del keys[index], free[index]
                    if rest:
                        takings.odd[len(addresses)] = size = span.size_bytes
                span.requested_bytes = nbytes
                slots[slot] = span
                addresses.append(span.address)
                allocated += size
                requested += nbytes
                if allocated > peak:
                    peak = allocated
                if requested > requested_peak:
                    requested_peak = requested
                if allocated > top_bytes:
                    top_bytes, takings.top_at, takings.top_workspace_bytes = allocated, at, 0
                continue
            if fields == 4 and act[2]:  # blocks of different pools: each goes back to where it came from
                found = []
                for size in act[1]:
                    pool, least_bytes = (small, MIN_BLOCK_BYTES) if size <= SMALL_BYTES else (large, remainder_bytes)
                    index = pool.find(size)
                    if index == len(pool.free):
                        break
                    span = pool.free[index]
                    found.append((span.address, span.size_bytes if span.size_bytes - size < least_bytes else size))
                else:
                    held = 0
                    for address, size in found:
                        takings.odd[len(addresses)] = size
                        addresses.append(address)
                        held += size
                    if allocated + held > peak:
                        peak = allocated + held
                    if requested + act[2] > requested_peak:
                        requested_peak = requested + act[2]
                    if allocated + held > top_bytes:
                        top_bytes, takings.top_at, takings.top_workspace_bytes = allocated + held, at, held
                    continue
            elif fields == 2:  # allocate and free: the block goes back to where it came from
                size, nbytes = act
                if size <= SMALL_BYTES:
                    pool, least_bytes = small, MIN_BLOCK_BYTES
                else:
                    pool, least_bytes = large, remainder_bytes
                index = bisect_left(pool.keys, size << ADDRESS_BITS)
                if index < len(pool.keys):
                    span = pool.free[index]
                    if span.size_bytes - size < least_bytes:
                        size = span.size_bytes
                    if size != act[0]:
                        takings.odd[len(addresses)] = size
                    addresses.append(span.address)
                    if allocated + size > peak:
                        peak = allocated + size
                    if requested + nbytes > requested_peak:
                        requested_peak = requested + nbytes
                    if allocated + size > top_bytes:
                        top_bytes, takings.top_at, takings.top_workspace_bytes = allocated + size, at, 0
                    continue
            elif fields > 4:
                elsewhere(act, slots, takings)
                continue
            self._allocated_bytes, self._peak_allocated_bytes = allocated, peak
            self._requested_bytes, self._peak_requested_bytes = requested, requested_peak
            takings.top_bytes, top_at, takings.top_at = top_bytes, takings.top_at, -1
            play_plainly(self, [act], slots, takings, elsewhere, stream)
            takings.top_at = top_at if takings.top_at < 0 else at
            allocated, peak, requested, requested_peak, top_bytes = (self._allocated_bytes, self._peak_allocated_bytes,
                                                                     self._requested_bytes, self._peak_requested_bytes,
                                                                     takings.top_bytes)
        self._allocated_bytes, self._peak_allocated_bytes = allocated, peak
        self._requested_bytes, self._peak_requested_bytes = requested, requested_peak
        takings.top_bytes = top_bytes

    def empty_cache(self) -> None:
        """Give every segment without a live block (of expandable ones, every such page) back to the device."""
        self._release_cached()

    def mapped_ranges(self) -> list[list[Span]]:
        """The spans of all segments, those of each contiguous mapped range together, by address."""
        return mapped_ranges(self._segments.values())

    def snapshot(self, device: int = 0) -> list[SegmentSnapshot]:
        """The state of all segments, by address, in the form of ``torch.cuda.memory_snapshot``.

        An expandable segment appears as one entry per contiguous mapped range. ``frames`` are empty, and the
        ``requested_size`` of inactive blocks is 0.
        """
        return snapshot_segments(self._segments.values(), device)

    def _allocate_empty(self, nbytes: int, stream: int) -> Block:
        if nbytes < 0:
            raise InputError(f"nbytes={nbytes!r}: must not be negative")
        # PyTorch gives a null pointer; addresses above all segments keep these blocks apart as well.
        self._next_empty_address += MIN_BLOCK_BYTES
        return Block(self._next_empty_address, 0, 0, stream, self._empty_span)

    # get_pool, with a pool for each stream where PyTorch sorts one pool by stream
    def _make_pool(self, stream: int, size_bytes: int) -> Pool:
        is_small = size_bytes <= SMALL_BYTES
        pool = Pool(self, self.options, stream, is_small)
        (self._small_pools if is_small else self._large_pools)[stream] = pool
        return pool

    def _pools(self) -> list[Pool]:
        return [*self._large_pools.values(), *self._small_pools.values()]

    # get_free_block
    def _take_free(self, pool: Pool, size_bytes: int) -> Span | None:
        if self._collects_garbage and not pool.is_small:
            self._large_searches += 1
        free = pool.free
        index = pool.find(size_bytes)
        if index == len(free):
            return None
        if pool.page_bytes is not None:
            # best fit by the size that a span could grow to, not by what it has now
            while index + 1 < len(free) and _expandable_bytes(free[index + 1]) < _expandable_bytes(free[index]):
                index += 1
        if self._max_split_bytes is not None:
            found_bytes = free[index].size_bytes
            if size_bytes < self._max_split_bytes <= found_bytes:
                return None
            if size_bytes >= self._max_split_bytes and found_bytes >= size_bytes + self.options.max_non_split_rounding_bytes:
                return None
        return pool.pop(index)

    # malloc, where no free block was found
    def _take_new(self, pool: Pool, size_bytes: int, nbytes: int) -> Span:
        if self._collects_garbage:
            self._collect_garbage()
        span = self._reserve(pool, size_bytes)
        if span is not None:
            return span
        # With throw_on_cudamalloc_oom a request beyond the fraction fails before anything is given back (PyTorch PR
        # 179473).
        if not (self.options.throw_on_cudamalloc_oom and self._excess_bytes(size_bytes) > 0):
            if self._release_oversize(pool, size_bytes):
                span = self._reserve(pool, size_bytes)
            if span is None:
                self._release_cached()
                self.alloc_retry_count += 1
                span = self._reserve(pool, size_bytes)
        if span is None:
            limits = [limit for limit in (self._allowed_bytes, self.capacity_bytes) if limit is not None]
            raise DeviceOutOfMemoryError(nbytes, self._short_bytes, self._allocated_bytes, self._reserved_bytes,
                                         min(limits))
        return span

    def _excess_bytes(self, size_bytes: int) -> int:
        """By how much a new segment for ``size_bytes`` would exceed the memory fraction; not positive where it would
        not.
        """
        if self._allowed_bytes is None:
            return 0
        return self._reserved_bytes + self.options.segment_bytes(size_bytes) - self._allowed_bytes

    # alloc_block
    def _reserve(self, pool: Pool, size_bytes: int) -> Span | None:
        if self._allowed_bytes is not None and (excess_bytes := self._excess_bytes(size_bytes)) > 0:
            self._short_bytes = excess_bytes
            return None
        if pool.page_bytes is not None:
            return self._take_expandable(pool, size_bytes)
        segment_bytes = self.options.segment_bytes(size_bytes)
        if not self._take_from_device(segment_bytes):
            return None
        span = self._add_segment(pool, segment_bytes).head
        if self.observer is not None:
            self.observer("segment_alloc", span.address, segment_bytes)
        return span

    # cudaMalloc, cuMemCreate
    def _take_from_device(self, nbytes: int) -> bool:
        reserved = self._reserved_bytes + nbytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            self._short_bytes = reserved - self.capacity_bytes
            return False
        self._reserved_bytes = reserved
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved)
        return True

    def _add_segment(self, pool: Pool, nbytes: int) -> Segment:
        # the device's own pages are 2 MiB
        address = self._find_address(-(-nbytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES)
        segment = self._segments[address] = Segment(address, nbytes, pool, pool.page_bytes)
        return segment

    # cudaMalloc, cuMemAddressReserve
    def _find_address(self, nbytes: int) -> int:
        """The lowest gap that is large enough, else a new range of addresses below all others.

        The driver takes ranges from mmap, which goes downwards (Linux, mm/mmap.c: arch_get_unmapped_area_topdown). The
        ranges are read off public memory snapshots (segments of 1 GiB below 512 MiB below 20 MiB, each at a multiple of
        32 MiB, and one of 2 MiB behind that of 20 MiB); of the orders tried, this one meets the most of what an H200
        held, to the byte.
        """
        gaps = self._gaps
        address = room_bytes = 0
        for bytes_there, addresses in gaps.items():
            if bytes_there >= nbytes and (not room_bytes or addresses[0] < address):
                address, room_bytes = addresses[0], bytes_there
        if room_bytes:
            heappop(gaps[room_bytes])
            if not gaps[room_bytes]:
                del gaps[room_bytes]
            if room_bytes > nbytes:
                heappush(gaps.setdefault(room_bytes - nbytes, []), address + nbytes)
            return address
        range_bytes = -(-nbytes // ADDRESS_RANGE_BYTES) * ADDRESS_RANGE_BYTES
        self._lowest_address -= range_bytes
        if range_bytes > nbytes:
            heappush(gaps.setdefault(range_bytes - nbytes, []), self._lowest_address + nbytes)
        return self._lowest_address

    def _merge_free_neighbours(self, span: Span) -> Span:
        """Merge ``span``, not itself in the pool, with the free spans beside it."""
        pool = span.segment.pool
        left, right = span.prev, span.next
        if right is not None and right.requested_bytes is None and right.is_mapped:
            pool.remove(right)
            span.absorb_next()
        if left is not None and left.requested_bytes is None and left.is_mapped:
            pool.remove(left)
            left.absorb_next()
            return left
        return span

    # release_cached_blocks, release_blocks
    def _release_cached(self) -> None:
        for pool in self._pools():
            for span in list(pool.free):
                if pool.page_bytes is not None:
                    self._unmap(span)
                elif not span.is_split:
                    self._release(span)

    # release_block
    def _release(self, span: Span) -> None:
        span.segment.pool.remove(span)
        del self._segments[span.address]
        self._reserved_bytes -= span.size_bytes
        if self.observer is not None:
            self.observer("segment_free", span.address, span.size_bytes)

    # release_available_cached_blocks
    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Give back the best-fitting unsplittable span, else the largest ones until they add up; true if enough went."""
        if self._max_split_bytes is None or pool.page_bytes is not None:  # pages go with _release_cached
            return False
        # PyTorch seeks at least max_split_size here, which is the same: a smaller span of this size would have been
        # taken.
        index = pool.find(size_bytes)
        if index < len(pool.free):
            # A free span this large is a whole segment: should_split leaves none that is a part of one.
            self._release(pool.free[index])
            return True
        released_bytes = 0
        while released_bytes < size_bytes and pool.free and pool.free[-1].size_bytes >= self._max_split_bytes:
            released_bytes += pool.free[-1].size_bytes
            self._release(pool.free[-1])
        return released_bytes >= size_bytes

    # garbage_collect_cached_blocks
    def _collect_garbage(self) -> None:
        assert self._allowed_bytes is not None
        excess_bytes = self._reserved_bytes - int(self.options.garbage_collection_threshold * self._allowed_bytes)
        idle = [
            span for pool in self._large_pools.values() if pool.page_bytes is None for span in pool.free
            if not span.is_split
        ]
        while excess_bytes > 0 and idle:
            # age: searches since the free; all of at least average age go, even beyond what is needed
            average = sum(self._large_searches - span.freed_at for span in idle) / len(idle)
            for span in idle:
                if self._large_searches - span.freed_at >= average:
                    excess_bytes -= span.size_bytes
                    self._release(span)
            idle = [span for span in idle if self._large_searches - span.freed_at < average]

    # try_allocate_expandable_block
    def _take_expandable(self, pool: Pool, size_bytes: int) -> Span | None:
        span = self._find_expandable(pool, size_bytes)
        if not span.is_mapped:
            mapped = self._map(span, min(span.size_bytes, size_bytes))
            if mapped is None:
                return None
            span = mapped
        while span.size_bytes < size_bytes:
            unmapped = span.next
            assert unmapped is not None and not unmapped.is_mapped  # what _find_expandable made sure of
            mapped = self._map(unmapped, min(size_bytes - span.size_bytes, unmapped.size_bytes))
            if mapped is None:
                return None
            span = mapped
        pool.remove(span)
        return span

    # find_expandable_block
    def _find_expandable(self, pool: Pool, size_bytes: int) -> Span:
        """The lowest span from which free and unmapped spans in a row add up to ``size_bytes``."""
        for _, span in pool.unmapped:
            first = span.prev if span.prev is not None and span.prev.requested_bytes is None else span
            room_bytes = 0
            candidate: Span | None = first
            while candidate is not None and candidate.requested_bytes is None and room_bytes < size_bytes:
                room_bytes += candidate.size_bytes
                candidate = candidate.next
            if room_bytes >= size_bytes:
                return first
        # ExpandableSegment: addresses for 1 1/8 of the device's memory
        range_bytes = max(_UNBOUNDED_RANGE_BYTES,
                          size_bytes) if self.capacity_bytes is None else self.capacity_bytes * 9 // 8
        assert pool.page_bytes is not None
        span = self._add_segment(pool, -(-range_bytes // pool.page_bytes) * pool.page_bytes).head
        pool.insert_unmapped(span)
        return span

    # map_block, ExpandableSegment::map
    def _map(self, span: Span, nbytes: int) -> Span | None:
        """Back the start of an unmapped span by pages, at least ``nbytes``; the free span that it is then part of."""
        pool = span.segment.pool
        assert pool.page_bytes is not None
        mapped_bytes = -(-nbytes // pool.page_bytes) * pool.page_bytes
        if not self._take_from_device(mapped_bytes):
            return None
        if self.observer is not None:
            self.observer("segment_map", span.address, mapped_bytes)
        pool.remove_unmapped(span)
        if mapped_bytes < span.size_bytes:
            pool.insert_unmapped(span.split(mapped_bytes))
        span.is_mapped = True
        span = self._merge_free_neighbours(span)
        pool.insert(span)
        return span

    # unmap_block, release_expandable_segment
    def _unmap(self, span: Span) -> None:
        """Give back the pages that lie wholly within a free span, and the address range if nothing else is in it."""
        pool = span.segment.pool
        start, end = span.segment.whole_pages(span)
        if start >= end:
            return
        pool.remove(span)
        if start > span.address:
            before, span = span, span.split(start - span.address)
            pool.insert(before)
        if span.size_bytes > end - start:
            pool.insert(span.split(end - start))
        span.is_mapped = False
        self._reserved_bytes -= span.size_bytes
        if self.observer is not None:
            self.observer("segment_unmap", span.address, span.size_bytes)
        if span.next is not None and not span.next.is_mapped:
            pool.remove_unmapped(span.next)
            span.absorb_next()
        if span.prev is not None and not span.prev.is_mapped:
            span = span.prev
            span.absorb_next()
        else:
            pool.insert_unmapped(span)
        if not span.is_split:
            pool.remove_unmapped(span)
            del self._segments[span.address]


def _expandable_bytes(span: Span) -> int:
    after = span.next
    return span.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)
