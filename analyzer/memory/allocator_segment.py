"""The parts that the simulated allocator keeps its books in: segments, the spans they consist of, pools of free spans.

Source: ``Block``, ``BlockPool``, ``ExpandableSegment`` in ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.11 to 2.13).
"""
from __future__ import annotations

import sys
from bisect import bisect_left, insort
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

from .allocator_options import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorOptions

ADDRESS_BITS = 64  # of a pointer


@dataclass(slots=True, eq=False, repr=False)
class Span:
    """A range of a segment. Neighbours merge into the left one, so a segment's first span is always the same object."""

    address: int
    size_bytes: int
    segment: Segment
    is_mapped: bool = True
    requested_bytes: int | None = None  # bytes asked for where live, else None
    prev: Span | None = None
    next: Span | None = None
    freed_at: int = 0  # Block::gc_count_base

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def split(self, left_bytes: int) -> Span:
        """Cut after ``left_bytes``; the right part is new."""
        right = Span(self.address + left_bytes, self.size_bytes - left_bytes, self.segment, self.is_mapped)
        self.size_bytes = left_bytes
        right.prev, right.next, self.next = self, self.next, right
        if right.next is not None:
            right.next.prev = right
        return right

    def absorb_next(self) -> None:
        """Take in the neighbour on the right, which then is no span of its own."""
        right = self.next
        assert right is not None
        self.size_bytes += right.size_bytes
        self.next = right.next
        if right.next is not None:
            right.next.prev = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Span:
        deepcopy(self.segment, memo)
        return memo[id(self)]  # type: ignore[no-any-return]


class Segment:
    """One ``cudaMalloc``, or one expandable segment: an address range mapped in pages of ``page_bytes``."""

    __slots__ = ("head", "page_bytes", "pool")

    def __init__(self, address: int, size_bytes: int, pool: Pool, page_bytes: int | None) -> None:
        self.head = Span(address, size_bytes, self, is_mapped=page_bytes is None)
        self.pool = pool
        self.page_bytes = page_bytes  # None: not expandable

    def __deepcopy__(self, memo: dict[int, Any]) -> Segment:
        """Spans are copied one by one: along the chain, copies would be made in each other, deeper than Python goes."""
        made = memo[id(self)] = copy(self)
        span: Span | None = self.head
        before: Span | None = None
        while span is not None:
            copied = memo[id(span)] = copy(span)
            copied.segment, copied.prev = made, before
            if before is not None:
                before.next = copied
            before, span = copied, span.next
        made.head, made.pool = memo[id(self.head)], deepcopy(self.pool, memo)
        return made

    def whole_pages(self, span: Span) -> tuple[int, int]:
        """Addresses of the first and the end of the last page that lie within ``span``; empty where start >= end."""
        assert self.page_bytes is not None
        base = self.head.address
        start = base - (base - span.address) // self.page_bytes * self.page_bytes
        end = base + (span.address + span.size_bytes - base) // self.page_bytes * self.page_bytes
        return start, end


class Pool:
    """The free spans of one stream and size class, as ``BlockPool`` orders them: by size, then by address.

    ``keys`` are beside them in ``free``: size and address in one number, which is compared in half the time of a pair.
    """

    __slots__ = ("free", "is_small", "keys", "min_remainder_bytes", "owner", "page_bytes", "spare",
                 "split_below_bytes", "stream", "unmapped")

    def __init__(self, owner: object, options: AllocatorOptions, stream: int, is_small: bool) -> None:
        self.owner = owner
        self.stream = stream
        self.is_small = is_small
        # find_expandable_block: pages are as large as the segments that the pool takes otherwise
        self.page_bytes = None
        if options.expandable_segments:
            self.page_bytes = SMALL_SEGMENT_BYTES if is_small else options.large_segment_bytes
        self.keys: list[int] = []
        self.free: list[Span] = []  # BlockComparatorSize within one stream
        self.spare: list[Span] = []  # merged into others: used again, since making one takes longer
        self.unmapped: list[tuple[int, Span]] = []  # (address, span): BlockComparatorAddress
        # should_split
        if is_small or options.expandable_segments:
            self.split_below_bytes: int = sys.maxsize
            self.min_remainder_bytes = MIN_BLOCK_BYTES
        else:
            self.split_below_bytes = options.max_split_bytes or sys.maxsize
            self.min_remainder_bytes = SMALL_BYTES + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        made = memo[id(self)] = copy(self)
        made.spare, made.keys = [], list(self.keys)
        made.free, made.unmapped, made.owner = deepcopy((self.free, self.unmapped, self.owner), memo)
        return made

    def insert(self, span: Span) -> int:
        """Add a free span; its place in ``free``."""
        key = span.size_bytes << ADDRESS_BITS | span.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.free.insert(index, span)
        return index

    def remove(self, span: Span) -> None:
        """Take out a free span."""
        index = bisect_left(self.keys, span.size_bytes << ADDRESS_BITS | span.address)
        del self.keys[index], self.free[index]

    def take(self, index: int, size_bytes: int) -> Span:
        """Take out the free span at ``index``, cut to ``size_bytes`` where the rest is large enough to stay.

        Rule: ``alloc_found_block``, ``should_split``; the block keeps the low end.
        """
        keys, free = self.keys, self.free
        span = free[index]
        rest_bytes = span.size_bytes - size_bytes
        if rest_bytes < self.min_remainder_bytes or size_bytes >= self.split_below_bytes:
            del keys[index], free[index]
            return span
        address = span.address + size_bytes
        key = rest_bytes << ADDRESS_BITS | address
        if self.spare:
            rest = self.spare.pop()
            rest.address = address
            rest.size_bytes = rest_bytes
            rest.segment = span.segment
        else:
            rest = Span(address, rest_bytes, span.segment)
        span.size_bytes = size_bytes
        rest.prev = span
        rest.next = after = span.next
        if after is not None:
            after.prev = rest
        span.next = rest
        if not index or keys[index - 1] < key:  # the rest keeps the place in the order
            keys[index] = key
            free[index] = rest
            return span
        del keys[index], free[index]
        index = bisect_left(keys, key)
        keys.insert(index, key)
        free.insert(index, rest)
        return span

    def give_back(self, span: Span) -> Span:
        """Add a span that has become free, merged with its free neighbours. Rule: ``try_merge_blocks``."""
        keys, free = self.keys, self.free
        index = -1  # of the neighbour that it grows into
        size_bytes, right, left = span.size_bytes, span.next, span.prev
        if right is not None and right.requested_bytes is None and right.is_mapped:
            index = bisect_left(keys, right.size_bytes << ADDRESS_BITS | right.address)
            size_bytes += right.size_bytes
            span.next = after = right.next
            if after is not None:
                after.prev = span
            self.spare.append(right)
        if left is not None and left.requested_bytes is None and left.is_mapped:
            if index >= 0:
                del keys[index], free[index]
            index = bisect_left(keys, left.size_bytes << ADDRESS_BITS | left.address)
            size_bytes += left.size_bytes
            left.next = after = span.next
            if after is not None:
                after.prev = left
            self.spare.append(span)
            span = left
        span.size_bytes = size_bytes
        key = size_bytes << ADDRESS_BITS | span.address
        if index >= 0:
            if index + 1 == len(keys) or key < keys[index + 1]:  # it keeps its neighbour's place in the order
                keys[index], free[index] = key, span
                return span
            del keys[index], free[index]
        index = bisect_left(keys, key)
        keys.insert(index, key)
        free.insert(index, span)
        return span

    def find(self, size_bytes: int) -> int:
        """Where the smallest span of at least ``size_bytes`` stands; past the end where there is none."""
        return bisect_left(self.keys, size_bytes << ADDRESS_BITS)

    def insert_unmapped(self, span: Span) -> None:
        """Add a span of addresses without pages."""
        insort(self.unmapped, (span.address, span))

    def remove_unmapped(self, span: Span) -> None:
        """Take out a span of addresses without pages."""
        del self.unmapped[bisect_left(self.unmapped, (span.address,))]
