"""A quick plan: units of a limited size, each taken for its cost and a price of the bytes that it holds.

As algorithm 3 of Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016), it searches the
size that a segment may have; and as their walk forward looks at no more than what is held so far, a shortest path looks
at no more than cost and price.
"""
from __future__ import annotations

from collections.abc import Sequence

from .unit import Unit, peak_bytes, total_cost

_SIZES = tuple(2 ** (-i / 2) for i in range(9))       # of the limit, that a checkpoint may need: down to a sixteenth
_PRICES = tuple(10 ** (i / 4) for i in range(-12, 13))  # of a byte, in units of what a byte costs on average


def solve_greedy(units: Sequence[Unit], limit_bytes: int) -> list[Unit] | None:
    """A division within ``limit_bytes``, not always the cheapest; None where none was found."""
    by_first: dict[int, list[Unit]] = {}
    for u in units:
        by_first.setdefault(u.first, []).append(u)
    goal = max((u.last for u in units), default=-1) + 1
    average = max((u.cost for u in units), default=0.0) / max(1, sum(u.held_bytes for u in units if not u.is_region))
    best: list[Unit] | None = None
    for share in _SIZES:
        usable = {first: [u for u in row if u.work_bytes <= (share if u.is_region else 1) * limit_bytes]
                  for first, row in by_first.items()}
        for price in _PRICES:
            division = _take(usable, goal, price * average)
            if division is not None and peak_bytes(division) <= limit_bytes:
                if best is None or total_cost(division) < total_cost(best):
                    best = division
                break  # a higher price holds less and costs more
    return best


def _take(by_first: dict[int, list[Unit]], goal: int, price: float) -> list[Unit] | None:
    """The division of least cost and price of what it holds."""
    best: dict[int, tuple[float, Unit | None]] = {0: (0.0, None)}
    for place in sorted(by_first):
        if place in best:
            paid = best[place][0]
            for u in by_first[place]:
                total = paid + u.cost + price * u.held_bytes
                if u.last + 1 not in best or total < best[u.last + 1][0]:
                    best[u.last + 1] = (total, u)
    if goal not in best:
        return None
    division: list[Unit] = []
    place = goal
    while place:
        unit = best[place][1]
        assert unit is not None
        division.append(unit)
        place = unit.first
    return division[::-1]
