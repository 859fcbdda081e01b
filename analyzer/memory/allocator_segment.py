"""Captured sequences of allocations and frees, repeated at once."""
from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from .allocator_options import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorOptions

# The parts that the simulated allocator keeps its books in: segments, the spans they consist of, pools of free spans.
# Source: ``Block``, ``BlockPool``, ``ExpandableSegment`` in c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.11 to 2.13).

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
        before: Span | None = None
        for span in self.spans():
            copied = memo[id(span)] = copy(span)
            copied.segment, copied.prev = made, before
            if before is not None:
                before.next = copied
            before = copied
        made.head, made.pool = memo[id(self.head)], deepcopy(self.pool, memo)
        return made

    def spans(self) -> Iterator[Span]:
        span: Span | None = self.head
        while span is not None:
            yield span
            span = span.next

    def whole_pages(self, span: Span) -> tuple[int, int]:
        """Addresses of the first and the end of the last page that lie within ``span``; empty where start >= end."""
        assert self.page_bytes is not None
        base = self.head.address
        start = base - (base - span.address) // self.page_bytes * self.page_bytes
        end = base + (span.address + span.size_bytes - base) // self.page_bytes * self.page_bytes
        return start, end


class Pool:
    """The free spans of one stream and size class, as ``BlockPool`` orders them: by size, then by address. ``keys`` are
    beside them in ``free``: size and address in one number, which is compared in half the time of a pair.
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
        key = span.size_bytes << ADDRESS_BITS | span.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.free.insert(index, span)
        return index

    def remove(self, span: Span) -> None:
        index = bisect_left(self.keys, span.size_bytes << ADDRESS_BITS | span.address)
        del self.keys[index], self.free[index]

    def take(self, index: int, size_bytes: int) -> Span:
        """Take out a free span, its low end where the rest is large enough: ``alloc_found_block``, ``should_split``."""
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
        insort(self.unmapped, (span.address, span))

    def remove_unmapped(self, span: Span) -> None:
        del self.unmapped[bisect_left(self.unmapped, (span.address,))]


# Repeats a captured sequence of allocations and frees at once: what a replayed module costs is mostly this loop.
# A sequence is a list of `Instruction`s, which name blocks by the *slots* of a list that they are kept in.

class Opcode(IntEnum):
    """What an instruction does, with its three operands. Those of ``_ELSEWHERE`` are left to the replay's caller."""

    ALLOCATE = 0            #: slot, bytes as the allocator rounds them, bytes asked for
    FREE = 1                #: slot, None, None
    HOLD = 2                #: bytes asked for in all, those of each block rounded, as asked for; see `hold`
    HOLD_APART = 3          #: the same, of blocks none of which changes what the next is given
    ALLOCATE_ELSEWHERE = 4  #: slot, device, bytes
    FREE_ELSEWHERE = 5      #: slot, device, None
    HOLD_ELSEWHERE = 6      #: -1, device, bytes of each block


# A plain tuple: Python unpacks it fastest.
Instruction = tuple[Opcode, int, Any, Any]


def hold(requested: tuple[int, ...], rounded: tuple[int, ...]) -> Instruction:
    """The instruction for blocks that a kernel has while it runs: what it asks for, and that rounded."""
    small_count = sum(size <= SMALL_BYTES for size in rounded)
    is_apart = small_count <= 1 and len(rounded) - small_count <= 1 and all(requested)
    return Opcode.HOLD_APART if is_apart else Opcode.HOLD, sum(requested), rounded, requested


# Carries out an instruction about another memory: opcode, slot, device, bytes.
Elsewhere = Callable[[Opcode, int, Any, Any], None]


class Placements:
    """What the allocator gave to a replayed sequence. ``addresses`` of its blocks in order, ``odd`` the sizes of those
    that are larger than asked for (by position in ``addresses``), ``extras`` (position, action, address, bytes) of what
    else the allocator did before it gave the block of that position. ``top_bytes`` is the highest use, if above what it
    was before; ``top_at`` the instruction that reached it (-1: none) and ``top_workspace_bytes`` what was held then.
    """

    __slots__ = ("addresses", "odd", "extras", "top_bytes", "top_at", "top_workspace_bytes")

    def __init__(self, top_bytes: int) -> None:
        self.addresses: list[int] = []
        self.odd: dict[int, int] = {}
        self.extras: list[tuple[int, str, int, int]] = []
        self.top_bytes, self.top_at, self.top_workspace_bytes = top_bytes, -1, 0

    def observe(self, action: str, address: int, nbytes: int) -> None:
        """As the allocator's observer: blocks are known from the sequence itself, segments are not."""
        if action != "alloc" and action != "free":
            self.extras.append((len(self.addresses), action, address, nbytes))

    def add(self, address: int, nbytes: int, expected_bytes: int = -1) -> None:
        """Note the next block; -1: of any size."""
        if nbytes != expected_bytes:
            self.odd[len(self.addresses)] = nbytes
        self.addresses.append(address)


def replay_one_by_one(memory: Any, instructions: Iterable[Instruction], slots: list[Any], placements: Placements,
                      elsewhere: Elsewhere | None, first: int = 0, *stream: int) -> None:
    """Carry out the instructions, counted from ``first``, on any memory; ``slots`` then hold its blocks."""
    for at, (opcode, slot, size_bytes, requested_bytes) in enumerate(instructions, first):
        if opcode is Opcode.FREE:
            memory.free(memory.block_of(slots[slot]))
            continue
        if opcode > Opcode.HOLD_APART:
            assert elsewhere is not None, opcode
            elsewhere(opcode, slot, size_bytes, requested_bytes)
            continue
        held: list[Any] = []
        if opcode is Opcode.ALLOCATE:
            block = slots[slot] = memory.allocate(requested_bytes, *stream)
            placements.add(block.address, block.bytes, size_bytes)
        else:
            for nbytes in requested_bytes:
                held.append(memory.allocate(nbytes, *stream))
                placements.add(held[-1].address, held[-1].bytes)
        if memory.allocated_bytes > placements.top_bytes:
            placements.top_bytes, placements.top_at = memory.allocated_bytes, at
            placements.top_workspace_bytes = sum(block.bytes for block in held)
        for block in held:
            memory.free(block)


def replay_best_fit(memory: Any, instructions: Iterable[Instruction], slots: list[Any],
                    placements: Placements, elsewhere: Elsewhere | None, stream: int) -> None:
    """Carry out the instructions on an allocator of best fit, split and merge alone; ``slots`` then hold its spans."""
    ALLOCATE, FREE = Opcode.ALLOCATE, Opcode.FREE
    small, large = memory.pool(stream, 0), memory.pool(stream, SMALL_BYTES + 1)
    addresses = placements.addresses
    allocated, peak, requested, requested_peak = memory.usage
    top = placements.top_bytes
    higher = min(peak, top)  # a use up to here is news to neither
    for at, (opcode, slot, size, nbytes) in enumerate(instructions):
        if opcode is FREE:
            span = slots[slot]
            allocated -= span.size_bytes
            requested -= span.requested_bytes
            span.requested_bytes = None
            span.segment.pool.give_back(span)
        elif opcode is ALLOCATE:
            pool = small if size <= SMALL_BYTES else large
            index = bisect_left(pool.keys, size << ADDRESS_BITS)
            if index == len(pool.keys):
                memory.usage = allocated, peak, requested, requested_peak  # what an error tells
                index = memory.add_new(pool, size, nbytes)
            span = slots[slot] = pool.take(index, size)
            span.requested_bytes = nbytes
            taken = span.size_bytes
            if taken != size:
                placements.odd[len(addresses)] = taken
            addresses.append(span.address)
            allocated += taken
            requested += nbytes
            if requested > requested_peak:
                requested_peak = requested
            if allocated > higher:
                higher = allocated
                if higher > peak:
                    peak = higher
                if higher > top:
                    top, placements.top_at, placements.top_workspace_bytes = higher, at, 0
        elif opcode > Opcode.HOLD_APART:
            assert elsewhere is not None, opcode
            elsewhere(opcode, slot, size, nbytes)
        elif opcode is Opcode.HOLD_APART and (found := _find_apart(small, large, size)) is not None:
            held = 0
            for address, taken in found:
                placements.odd[len(addresses)] = taken
                addresses.append(address)
                held += taken
            requested_peak = max(requested_peak, requested + slot)
            if allocated + held > higher:
                higher = allocated + held
                peak = max(peak, higher)
                if higher > top:
                    top, placements.top_at, placements.top_workspace_bytes = higher, at, held
        else:
            memory.usage, placements.top_bytes = (allocated, peak, requested, requested_peak), top
            replay_one_by_one(memory, [(opcode, slot, size, nbytes)], slots, placements, None, at, stream)
            (_, peak, _, requested_peak), top = memory.usage, placements.top_bytes
            higher = min(peak, top)
    memory.usage, placements.top_bytes = (allocated, peak, requested, requested_peak), top


def _find_apart(small: Pool, large: Pool, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    found = []
    for size in sizes:
        pool = small if size <= SMALL_BYTES else large
        index = pool.find(size)
        if index == len(pool.free):
            return None
        span = pool.free[index]
        found.append((span.address, span.size_bytes if span.size_bytes - size < pool.min_remainder_bytes else size))
    return found
