"""Repeats a captured sequence of allocations and frees at once: what a replayed module costs is mostly this loop.

A sequence is a list of `Instruction`s, which name blocks by the *slots* of a list that they are kept in.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Protocol

from .allocator_options import SMALL_BYTES
from .allocator_segment import ADDRESS_BITS, Pool


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
    """What the allocator gave to a replayed sequence.

    ``addresses`` of its blocks in order, ``odd`` the sizes of those that are larger than asked for (by position in
    ``addresses``), ``extras`` (position, action, address, bytes) of what else the allocator did before it gave the
    block of that position. ``top_bytes`` is the highest use at an allocation or while blocks were held, if above what
    it was set to before; ``top_at`` the instruction that reached it (-1: none) and ``top_workspace_bytes`` what was
    held then.
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
            memory.free(slots[slot])
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


class _BestFitMemory(Protocol):
    """What `replay_best_fit` needs of an allocator."""

    usage: tuple[int, int, int, int]  #: bytes allocated, their peak, bytes requested, their peak

    def pool(self, stream: int, size_bytes: int) -> Pool: ...
    def add_new(self, pool: Pool, size_bytes: int, nbytes: int) -> int: ...


def replay_best_fit(memory: _BestFitMemory, instructions: Sequence[Instruction], slots: list[Any],
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
            replay_one_by_one(memory, [instructions[at]], slots, placements, None, at, stream)
            (_, peak, _, requested_peak), top = memory.usage, placements.top_bytes
            higher = min(peak, top)
    memory.usage, placements.top_bytes = (allocated, peak, requested, requested_peak), top


def _find_apart(small: Pool, large: Pool, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Addresses and sizes of blocks held apart that return where they came from; None where one takes a new segment."""
    found = []
    for size in sizes:
        pool = small if size <= SMALL_BYTES else large
        index = pool.find(size)
        if index == len(pool.free):
            return None
        span = pool.free[index]
        found.append((span.address, span.size_bytes if span.size_bytes - size < pool.min_remainder_bytes else size))
    return found
