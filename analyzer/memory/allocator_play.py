"""Repeats a recorded sequence of allocations and frees at once: what a played block costs is mostly this loop.

A sequence is a list of acts in places ("slots") of its own: an integer frees what is in that slot, ``(slot, bytes,
requested)`` allocates,
``(bytes, requested)`` is a block that is freed before anything else happens, `Held` blocks that are held together, and
any other tuple is about another memory and left to the caller. ``bytes`` are rounded as the allocator rounds.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .allocator_options import SMALL_BYTES


class Held(NamedTuple):
    """Blocks that a kernel holds while it runs: what it asks for, and that rounded.

    ``requested_bytes`` is the sum; 0 where blocks could be taken from one pool, so that one changes what the next is
    given.
    """

    blocks: tuple[int, ...]
    rounded: tuple[int, ...]
    requested_bytes: int
    kind: str = "held"  # no other act has four fields

    @classmethod
    def of(cls, blocks: tuple[int, ...], rounded: tuple[int, ...]) -> Held:
        """Blocks of these sizes, rounded as an allocator does."""
        small = sum(size <= SMALL_BYTES for size in rounded)
        return cls(blocks, rounded, sum(blocks) if small <= 1 and len(rounded) - small <= 1 and all(blocks) else 0)


class Takings:
    """What a played sequence was given.

    ``addresses`` of its blocks in order, ``odd`` the sizes of those that are larger than asked for (by position in
    ``addresses``), ``extras`` (position, action, address, bytes) of what else the allocator did before it gave the
    block of that position. ``top_bytes`` is the highest use at a birth or while blocks were held, if above what it was
    set to before; ``top_at`` the act that reached it (-1: none) and
    ``top_workspace_bytes`` what was held then.
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

    def give(self, address: int, nbytes: int, expected: int) -> None:
        if nbytes != expected:
            self.odd[len(self.addresses)] = nbytes
        self.addresses.append(address)


Elsewhere = Callable[[Any, list[Any], Takings], None]


def nowhere(act: Any, slots: list[Any], takings: Takings) -> None:
    """For sequences of which no act is about another memory."""
    raise AssertionError(f"{act!r}: about another memory")


def play_plainly(memory: Any, acts: list[Any], slots: list[Any], takings: Takings, elsewhere: Elsewhere, *stream:
                 int) -> None:
    """Play ``acts`` one by one on any memory that can allocate and free. ``slots`` then hold its blocks."""
    for at, act in enumerate(acts):
        if type(act) is int:
            memory.free(slots[act])
            continue
        workspace = 0
        held: list[Any] = []
        size = len(act)
        if size == 3:
            region = slots[act[0]] = memory.allocate(act[2], *stream)
            takings.give(region.address, region.bytes, act[1])
        elif size == 2:
            held.append(memory.allocate(act[1], *stream))
            takings.give(held[0].address, held[0].bytes, act[0])
        elif size == 4:
            for requested in act.blocks:
                held.append(memory.allocate(requested, *stream))
                takings.give(held[-1].address, held[-1].bytes, -1)  # whatever it is
            workspace = sum(r.bytes for r in held)
        else:
            elsewhere(act, slots, takings)
            continue
        if memory.allocated_bytes > takings.top_bytes:
            takings.top_bytes, takings.top_at, takings.top_workspace_bytes = memory.allocated_bytes, at, workspace
        for region in held:
            memory.free(region)
