"""The pieces of a plan: intervals of the program that run plainly or under a checkpoint, what each costs and holds.

A plan divides the program into consecutive units. What a unit adds to memory does not depend on how the rest is
divided, so that the memory of a plan is a sum, and the best plan a shortest path with a limit: see `chain` and `exact`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Atoms ``first`` to ``last``. ``keeps`` are ordinals of its products whose results a checkpoint keeps."""

    first: int
    last: int
    is_region: bool
    cost: float             #: of running again
    held_bytes: int         #: that it adds to what is held until its backward has run
    work_bytes: int         #: most that its forward or backward needs on top of what units before it hold
    keeps: tuple[int, ...] = ()
    #: ordinals of products that are not run again, as nothing in the unit needs their results
    skips: tuple[int, ...] = ()


@dataclass(frozen=True)
class Division:
    """The units of a plan in order, and a cost that no division has less than, where that is known."""

    units: list[Unit]
    bound: float | None = None


def peak_bytes(division: Sequence[Unit]) -> int:
    held = peak = 0
    for u in division:
        peak = max(peak, held + u.work_bytes)
        held += u.held_bytes
    return peak


def total_cost(division: Sequence[Unit]) -> float:
    return sum(u.cost for u in division)
