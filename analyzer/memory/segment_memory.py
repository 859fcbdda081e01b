"""What a simulated device hands out: segments within its capacity, at the addresses that the driver would choose.

Source of every rule: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.11 to 2.13).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.errors import InputError

from .allocator_options import ADDRESS_RANGE_BYTES, LARGE_ROUNDING_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorOptions
from .allocator_segment import Pool, Segment, Span
from .allocator_stats import AllocatorStats

# Without a capacity the address range of an expandable segment has no natural size; requests above it get a larger one.
_UNBOUNDED_RANGE_BYTES = 1 << 40


DEFAULT_POOL = (0, 0)  #: as PyTorch names what is no private pool


class PrivatePool(NamedTuple):
    """The part for one stream of a pool of a CUDA graph, or of a ``torch.cuda.MemPool``."""

    id: tuple[int, int]
    stream: int
    splits: bool = True  #: whether its free spans are cut


class PoolStreams(dict[int, int]):
    """The numbers that stand for streams in a private pool: number of a stream -> its number in there."""

    def __init__(self, handle: tuple[int, int], splits: bool = True) -> None:
        super().__init__()
        self.handle, self.splits = handle, splits


class SegmentMemory:
    """The segments of one device: taken from it, kept in pools of free spans, given back."""

    def __init__(self, capacity_bytes: int | None, options: AllocatorOptions, top_address: int,
                 total_bytes: Callable[[], int | None] | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise InputError(f"capacity_bytes={capacity_bytes!r}: must be positive, or None for no limit")
        if top_address <= 0 or top_address % MIN_BLOCK_BYTES:
            raise InputError(f"top_address={top_address!r}: must be a positive multiple of {MIN_BLOCK_BYTES}")
        self.capacity_bytes = capacity_bytes
        self.options = options
        self.stats = AllocatorStats(options.max_split_bytes)
        #: told of every event: (action, address, bytes), with the names of ``torch.cuda.memory._snapshot``'s traces
        self.observer: Callable[[str, int, int], None] | None = None
        #: asked of an error where a request fails: whether it is served all the same, as by a larger device
        self.outgrows: Callable[[Exception], bool] | None = None
        self.memory_fraction = 1.0  #: the share of the device that may be reserved
        self._allowed_bytes: int | None = None
        self._collects_garbage = False
        self._find_total = total_bytes
        if options.per_process_memory_fraction < 1.0:
            self.set_fraction(options.per_process_memory_fraction)
        self._max_split_bytes = options.max_split_bytes
        self._small_pools: dict[int, Pool] = {}
        self._large_pools: dict[int, Pool] = {}
        self._segments: dict[int, Segment] = {}
        #: streams whose free segments stay: those of private pools that a CUDA graph uses
        self.kept_streams: set[int] = set()
        self.private_pools: dict[int, PrivatePool] = {}  #: by the number that stands for their stream
        self.is_diverted = False  #: whether a ``MemPool`` takes what is allocated: nothing is given back meanwhile
        self._lowest_address = top_address
        # heaps of the addresses left over in ranges, by how many bytes there are from there
        self._gaps: dict[int, list[int]] = {}
        self._large_searches = 0  # get_free_blocks_call_count of the large pool
        self._short_bytes = 0  # by how much the device last refused
        #: taken from the device, live or cached: ``torch.cuda.memory_reserved``
        self.reserved_bytes = self._peak_reserved_bytes = 0

    # setMemoryFraction: the limit that the allocator itself keeps, beside what the device has
    def set_fraction(self, fraction: float) -> None:
        """Let this process reserve that share of the device's memory. Raises InputError where that is not known."""
        total_bytes = None if self._find_total is None else self._find_total()
        if total_bytes is None:
            total_bytes = self.capacity_bytes
        if total_bytes is None:
            raise InputError(f"per_process_memory_fraction={fraction!r}: a share of no known size; give "
                             "capacity_bytes")
        self.memory_fraction, self._allowed_bytes = fraction, int(fraction * total_bytes)
        # malloc: idle segments are collected only where a fraction was set
        self._collects_garbage = self.options.garbage_collection_threshold > 0.0

    # get_pool, with a pool for each stream where PyTorch sorts one pool by stream
    def pool(self, stream: int, size_bytes: int) -> Pool:
        pools = self._small_pools if size_bytes <= SMALL_BYTES else self._large_pools
        if stream not in pools:
            pool = pools[stream] = Pool(self, self.options, stream, is_small=size_bytes <= SMALL_BYTES)
            private = self.private_pools.get(stream)
            if private is not None and not private.splits:  # should_split
                pool.split_below_bytes = 0
        return pools[stream]

    def take_segments(self, segments: Iterable[Segment]) -> Iterator[Span]:
        for theirs in segments:
            pool = self.pool(theirs.pool.stream, 0 if theirs.pool.is_small else SMALL_BYTES + 1)
            segment = self._segments[theirs.head.address] = Segment(theirs.head.address, 0, pool, theirs.page_bytes)
            last: Span | None = None
            for span in theirs.spans():
                mine = Span(span.address, span.size_bytes, segment, span.is_mapped, span.requested_bytes, last)
                if last is None:
                    segment.head = mine
                else:
                    last.next = mine
                if mine.requested_bytes is not None:
                    yield mine
                elif mine.is_mapped:
                    pool.insert(mine)
                else:
                    pool.insert_unmapped(mine)
                last = mine

    def mapped_ranges(self) -> list[list[Span]]:
        """The spans of all segments, those of each contiguous mapped range together, by address."""
        ranges = [list(spans) for segment in self._segments.values()
                  for is_mapped, spans in groupby(segment.spans(), lambda span: span.is_mapped) if is_mapped]
        return sorted(ranges, key=lambda spans: spans[0].address)

    def _pools(self) -> list[Pool]:
        return [*self._large_pools.values(), *self._small_pools.values()]

    def _excess_bytes(self, size_bytes: int) -> int:
        """By how much a new segment for ``size_bytes`` would exceed the memory fraction; else at most 0."""
        if self._allowed_bytes is None:
            return 0
        return self.reserved_bytes + self.options.segment_bytes(size_bytes) - self._allowed_bytes

    # alloc_block
    def reserve(self, pool: Pool, size_bytes: int) -> Span | None:
        """A new span of at least ``size_bytes``, in no pool; None where the device has not enough left."""
        if self._allowed_bytes is not None and (excess_bytes := self._excess_bytes(size_bytes)) > 0:
            self._short_bytes = excess_bytes
            return None
        if pool.page_bytes is not None:
            return self._take_expandable(pool, size_bytes)
        segment_bytes = self.options.segment_bytes(size_bytes)
        if not self._take_from_device(segment_bytes):
            return None
        span = self._add_segment(pool, segment_bytes).head
        self._count(pool, segment_bytes, 1)
        if self.observer is not None:
            self.observer("segment_alloc", span.address, segment_bytes)
        return span

    def outgrow(self, pool: Pool, size_bytes: int, error: Exception) -> Span:
        """A new span beyond the limits, of which there is none from then on. Raises ``error`` unless it `outgrows`."""
        try:
            if self.outgrows is None or not self.outgrows(error):
                raise error
        finally:
            del error  # else this frame, which the error holds, held the error: tensors of a caller would live on
        self.capacity_bytes = self._allowed_bytes = None
        self._collects_garbage = False
        span = self.reserve(pool, size_bytes)
        assert span is not None
        return span

    def _count(self, pool: Pool, nbytes: int, segments: int) -> None:
        private = self.private_pools.get(pool.stream)
        self.stats.reserved(pool.is_small, nbytes, segments, None if private is None else private.id)

    # cudaMalloc, cuMemCreate
    def _take_from_device(self, nbytes: int) -> bool:
        reserved = self.reserved_bytes + nbytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            self._short_bytes = reserved - self.capacity_bytes
            return False
        self.reserved_bytes = reserved
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved)
        return True

    def _add_segment(self, pool: Pool, nbytes: int) -> Segment:
        # the device's own pages are 2 MiB
        address = self._find_address(-(-nbytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES)
        segment = self._segments[address] = Segment(address, nbytes, pool, pool.page_bytes)
        return segment

    # cudaMalloc, cuMemAddressReserve
    def _find_address(self, nbytes: int) -> int:
        """The lowest gap that is large enough, else a new range of addresses below all others. The driver takes ranges
        from mmap, which goes downwards (Linux, mm/mmap.c: arch_get_unmapped_area_topdown). The ranges are read off
        public memory snapshots (segments of 1 GiB below 512 MiB below 20 MiB, each at a multiple of 32 MiB, and one of
        2 MiB behind that of 20 MiB); of the orders tried, this one meets the most of what an H200 held, to the byte.
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

    # release_cached_blocks, release_blocks
    def _release_cached(self) -> None:
        self.stats.wait_count += not self.is_diverted
        for pool in self._pools():
            is_kept = pool.stream in self.kept_streams or self.is_diverted and pool.stream not in self.private_pools
            for span in [] if is_kept else list(pool.free):
                if pool.page_bytes is not None:
                    self._unmap(span)
                elif not span.is_split:
                    self._release(span)

    # release_block
    def _release(self, span: Span) -> None:
        span.segment.pool.remove(span)
        del self._segments[span.address]
        self.reserved_bytes -= span.size_bytes
        self._count(span.segment.pool, -span.size_bytes, -1)
        if self.observer is not None:
            self.observer("segment_free", span.address, span.size_bytes)

    # release_available_cached_blocks
    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Give back the best-fitting unsplittable span, else the largest until they add up; true if enough went."""
        if self._max_split_bytes is None or pool.page_bytes is not None:  # pages go with _release_cached
            return False
        # PyTorch seeks at least max_split_size here, which is the same: a smaller span of this size would be taken.
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
        excess_bytes = self.reserved_bytes - int(self.options.garbage_collection_threshold * self._allowed_bytes)
        idle = [span for pool in self._large_pools.values() if pool.page_bytes is None for span in pool.free
                if not span.is_split]
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
        while not span.is_mapped or span.size_bytes < size_bytes:
            unmapped, mapped_bytes = (span.next, span.size_bytes) if span.is_mapped else (span, 0)
            assert unmapped is not None and not unmapped.is_mapped  # what _find_expandable made sure of
            mapped = self._map(unmapped, min(size_bytes - mapped_bytes, unmapped.size_bytes))
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
        range_bytes = max(_UNBOUNDED_RANGE_BYTES, size_bytes)
        if self.capacity_bytes is not None:
            range_bytes = self.capacity_bytes * 9 // 8
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
        self._count(pool, mapped_bytes, 0)
        if self.observer is not None:
            self.observer("segment_map", span.address, mapped_bytes)
        pool.remove_unmapped(span)
        if mapped_bytes < span.size_bytes:
            pool.insert_unmapped(span.split(mapped_bytes))
        span.is_mapped = True
        return pool.give_back(span)

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
        self.reserved_bytes -= span.size_bytes
        self._count(pool, -span.size_bytes, 0)
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


# What an allocator is asked for, so that the same can be asked of one that gets blocks back later.

class JournalAction(IntEnum):
    """What was asked for: ``ALLOCATE`` and ``USE`` (``record_stream``) name a stream, ``EMPTY`` is ``empty_cache``."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    EMPTY = 3


class JournalEntry(NamedTuple):
    """One request, and where in the run it was made, as the journal was told."""

    action: JournalAction
    place: Any
    address: int
    nbytes: int
    stream: int


@dataclass
class Journal:
    """The requests from one moment on."""

    place: Callable[[], Any]  #: where in the run one is made
    limit_bytes: int | None  #: all that the allocator may reserve
    entries: list[JournalEntry] = field(default_factory=list)

    def note(self, action: JournalAction, address: int = 0, nbytes: int = 0, stream: int = 0) -> None:
        self.entries.append(JournalEntry(action, self.place(), address, nbytes, stream))
