"""What ``torch.cuda.memory_stats`` counts: of all memory, and of the small and the large pool alone.

Source: ``DeviceStats`` in ``c10/core/CachingDeviceAllocator.h``, ``Stat`` in ``c10/core/Allocator.h``, and where
``c10/cuda/CUDACachingAllocator.cpp`` changes them: ``alloc_found_block``, ``free_block``, ``alloc_block``,
``release_block``, ``map_block``, ``unmap_block``.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from .allocator_segment import Pool, Span

_KINDS = ("all", "small_pool", "large_pool")


class Stat:
    """A number over time: what it is, its highest since it was last set back, all that was added since then."""

    __slots__ = ("current", "peak", "allocated", "_before")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0
        self._before = 0  # at the last `forget`

    def add(self, change: int) -> None:
        """Add ``change``, which is negative where something was freed."""
        self.current += change
        if change > 0:
            self.allocated += change
            if self.current > self.peak:
                self.peak = self.current

    def forget(self) -> None:
        """Set back what was added and freed so far."""
        self.allocated, self._before = 0, self.current

    def to_dict(self) -> dict[str, int]:
        """By the names that torch gives them."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated,
                "freed": self._before + self.allocated - self.current}


@dataclass(slots=True)
class PoolStats:
    """The statistics of one kind of memory, by torch's names."""

    allocation: Stat = field(default_factory=Stat)
    allocated_bytes: Stat = field(default_factory=Stat)
    requested_bytes: Stat = field(default_factory=Stat)
    segment: Stat = field(default_factory=Stat)
    reserved_bytes: Stat = field(default_factory=Stat)
    inactive_split: Stat = field(default_factory=Stat)
    inactive_split_bytes: Stat = field(default_factory=Stat)


_OF_BLOCKS = ("allocation", "allocated_bytes", "requested_bytes", "inactive_split", "inactive_split_bytes")
_NAMES = tuple([one.name for one in fields(PoolStats)])


class AllocatorStats:
    """The statistics of one allocator. A block is active for as long as it is allocated, since no block waits here for
    a stream to end.
    """

    def __init__(self, max_split_bytes: int | None) -> None:
        self.max_split_bytes = max_split_bytes
        self._all, small, large = self._rows = (PoolStats(), PoolStats(), PoolStats())
        self._of = ((self._all, large), (self._all, small))  # by whether a pool is the small one
        #: bytes that each private pool reserved, by its handle
        self.private: dict[tuple[int, int], tuple[Stat, Stat, Stat]] = {}
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.retry_count = self.failure_count = self.rejection_count = self.wait_count = 0
        self.device_allocations = self.device_frees = 0
        #: whether sequences were repeated at once, of which only the bytes in use are counted
        self.is_partial = False

    # alloc_found_block: free parts of segments are counted, but not those of expandable ones
    def take(self, pool: Pool, index: int, size_bytes: int, requested_bytes: int) -> Span:
        """What ``pool.take`` gives, counted."""
        found = pool.free[index]
        was_split, whole_bytes = found.is_split, found.size_bytes
        span = pool.take(index, size_bytes)
        rest_bytes, splits, split_bytes = whole_bytes - span.size_bytes, 0, 0
        if pool.page_bytes is None:
            if was_split:
                splits, split_bytes = 0 if rest_bytes else -1, -span.size_bytes
            elif rest_bytes:
                splits, split_bytes = 1, rest_bytes
        self._count_block(pool, 1, span.size_bytes, requested_bytes, splits, split_bytes)
        return span

    # free_block
    def give_back(self, span: Span, requested_bytes: int) -> Span:
        """What ``pool.give_back`` of the span's pool gives, counted."""
        pool, nbytes = span.segment.pool, span.size_bytes
        merged = sum([other is not None and other.requested_bytes is None and other.is_mapped
                      for other in (span.prev, span.next)])
        kept = pool.give_back(span)
        splits = split_bytes = 0
        if pool.page_bytes is None:
            splits, split_bytes = (1 - merged, nbytes) if kept.is_split else (-merged, nbytes - kept.size_bytes)
        self._count_block(pool, -1, -nbytes, -requested_bytes, splits, split_bytes)
        return kept

    def _count_block(self, pool: Pool, blocks: int, nbytes: int, requested_bytes: int, splits: int,
                     split_bytes: int) -> None:
        for row in self._of[pool.is_small]:
            row.allocation.add(blocks)
            row.allocated_bytes.add(nbytes)
            row.requested_bytes.add(requested_bytes)
            if split_bytes:
                row.inactive_split.add(splits)
                row.inactive_split_bytes.add(split_bytes)
        if self._is_oversize(nbytes):
            self.oversize_allocations.add(blocks)

    def _is_oversize(self, nbytes: int) -> bool:
        return self.max_split_bytes is not None and abs(nbytes) >= self.max_split_bytes

    def reserved(self, is_small: bool, nbytes: int, segments: int, private: tuple[int, int] | None) -> None:
        """The device gave ``nbytes`` in ``segments`` segments (0: as pages of one), or with negative numbers got them
        back; ``private`` is the handle of a private pool.
        """
        if nbytes > 0:
            self.device_allocations += 1
        else:
            self.device_frees += 1
        for row in self._of[is_small]:
            row.segment.add(segments)
            row.reserved_bytes.add(nbytes)
        if segments and self._is_oversize(nbytes):
            self.oversize_segments.add(segments)
        if private is not None:
            whole, small, large = self.private.setdefault(private, (Stat(), Stat(), Stat()))
            for stat in (whole, small if is_small else large):
                stat.add(nbytes)

    def recount(self, spans: Iterable[Span]) -> None:
        """Bring up to date what blocks are now, after some that were not counted: ``spans`` are all that are mapped."""
        found = {row: [0] * len(_OF_BLOCKS) for row in range(3)}
        oversize = 0
        for span in spans:
            pool, size_bytes = span.segment.pool, span.size_bytes
            if span.requested_bytes is not None:
                change = (1, size_bytes, span.requested_bytes, 0, 0)
                oversize += self._is_oversize(size_bytes)
            elif pool.page_bytes is None and span.is_split:
                change = (0, 0, 0, 1, size_bytes)
            else:
                continue
            for row in (0, 1 if pool.is_small else 2):
                found[row] = [one + more for one, more in zip(found[row], change)]
        for stats, counted in zip(self._rows, found.values()):
            for name, now in zip(_OF_BLOCKS, counted):
                stat: Stat = getattr(stats, name)
                stat.add(now - stat.current)
        self.oversize_allocations.add(oversize - self.oversize_allocations.current)

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        for stat in self._list():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats``."""
        for stat in self._list():
            stat.forget()
        self.retry_count = self.failure_count = self.rejection_count = self.wait_count = 0
        self.device_allocations = self.device_frees = 0

    def _list(self) -> list[Stat]:
        return [*[getattr(row, name) for row in self._rows for name in _NAMES],
                *[stat for stats in self.private.values() for stat in stats],
                self.oversize_allocations, self.oversize_segments]

    def to_dict(self) -> dict[str, Any]:
        """As ``torch._C._cuda_memoryStats`` gives them."""
        found: dict[str, Any] = {
            name: {kind: getattr(row, name).to_dict() for kind, row in zip(_KINDS, self._rows)}
            for name in _NAMES}
        return {**found, "active": found["allocation"], "active_bytes": found["allocated_bytes"],
                "oversize_allocations": self.oversize_allocations.to_dict(),
                "oversize_segments": self.oversize_segments.to_dict(),
                "reserved_bytes_by_private_pools": {
                    handle: {kind: stat.to_dict() for kind, stat in zip(_KINDS, stats)}
                    for handle, stats in self.private.items()},
                # -1: of a signed number that holds the largest there is
                "max_split_size": -1 if self.max_split_bytes is None else self.max_split_bytes,
                "num_alloc_retries": self.retry_count, "num_ooms": self.failure_count,
                "num_sync_all_streams": self.wait_count, "num_device_alloc": self.device_allocations,
                "num_device_free": self.device_frees, "num_oom_rejections": self.rejection_count}
