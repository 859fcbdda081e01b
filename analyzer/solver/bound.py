"""What no division into units can cost less than, from prices of memory (a Lagrangian relaxation).

Instead of keeping each atom of the program within the limit, each byte needed at it is given a price, and each byte of
the limit is paid back at it. Then the cheapest division is a shortest path, and costs no more than the cheapest one
that keeps to the limit, at whatever prices. Good prices are found by following subgradients (Held, Wolfe and Crowder,
"Validation of subgradient optimization", 1974). The same prices bound what any rest of a division costs, given what is
held before it: see `exact`.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .unit import Unit

_STEPS = 600      # of the search for prices; a step is one shortest path
_PATIENCE = 15    # steps without a better bound, after which they are halved
_LEAST_STEP = 1e-4


class UnitGraph:
    """Units that fit the limit as edges between places, sorted by where they begin; bytes in shares of the limit.

    The interval between a place and the next lies within one unit of each division, which says what is needed there.
    """

    def __init__(self, units: Sequence[Unit], limit_bytes: int) -> None:
        self.units = sorted((u for u in units if u.work_bytes <= limit_bytes), key=lambda u: (u.first, u.last))
        goal = max(u.last for u in units) + 1
        self.places = sorted({0, goal, *(u.first for u in self.units), *(u.last + 1 for u in self.units)})
        index = {place: i for i, place in enumerate(self.places)}
        self.begin = np.array([index[u.first] for u in self.units], dtype=np.int64)
        self.end = np.array([index[u.last + 1] for u in self.units], dtype=np.int64)
        # the first unit that begins at each place
        self.leaving = np.searchsorted(self.begin, np.arange(len(self.places) + 1))
        self.cost = np.array([u.cost for u in self.units])
        self.held = np.array([u.held_bytes for u in self.units]) / max(1, limit_bytes)
        self.work = np.array([u.work_bytes for u in self.units]) / max(1, limit_bytes)

    def charge(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What each unit costs at these prices; and the prices of a byte that is held from each place on."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        onwards = paid[-1] - paid
        return self.cost + self.held * onwards[self.end] + self.work * (paid[self.end] - paid[self.begin]), onwards

    def shortest(self, costs: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The least cost from each place to the end, and the units of the cheapest way."""
        last = len(self.places) - 1
        least = np.full(last + 1, np.inf)
        least[last] = 0.0
        choice = np.full(last + 1, -1)
        for place in range(last - 1, -1, -1):
            units = slice(self.leaving[place], self.leaving[place + 1])
            if units.stop > units.start:
                totals = costs[units] + least[self.end[units]]
                choice[place] = units.start + int(totals.argmin())
                least[place] = totals.min()
        path, place = [], 0
        while place < last:
            path.append(int(choice[place]))
            place = int(self.end[path[-1]])
        return least, path

    def relax(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """What no division costs less than, by these prices, and by how much each is to rise."""
        costs, onwards = self.charge(prices)
        least, path = self.shortest(costs)
        return float(least[0] - onwards[0]), self.excess(path)

    def excess(self, path: Sequence[int]) -> np.ndarray:
        """At each interval, what a division needs above the limit."""
        found = np.zeros(len(self.places) - 1)
        held = 0.0
        for i in path:
            found[self.begin[i]:self.end[i]] = held + self.work[i] - 1
            held += self.held[i]
        return found


def find_prices(graph: UnitGraph, known_cost: float) -> tuple[float, np.ndarray]:
    """The best bound found, and its prices; ``known_cost`` is that of some division within the limit."""
    prices = best_prices = np.zeros(len(graph.places) - 1)
    bound, share, waited = 0.0, 1.0, 0
    for _ in range(_STEPS):
        value, slope = graph.relax(prices)
        if value > bound * (1 + 1e-5):
            bound, best_prices, waited = value, prices, 0
        else:
            waited += 1
        if waited > _PATIENCE:
            share, waited, prices = share / 2, 0, best_prices
            value, slope = graph.relax(prices)
        slope = np.where((prices <= 0) & (slope < 0), 0.0, slope)
        length = float(slope @ slope)
        if not length or share < _LEAST_STEP or value >= known_cost:
            break
        prices = np.maximum(0.0, prices + share * (known_cost - value) / length * slope)
    return bound, best_prices


def units_left(graph: UnitGraph, prices: np.ndarray, known_cost: float) -> np.ndarray:
    """Which units a division of at most ``known_cost`` may have, by what they cost at these prices."""
    costs, onwards = graph.charge(prices)
    least, _ = graph.shortest(costs)
    before = np.full(len(graph.places), np.inf)
    before[0] = 0.0
    for place in range(len(graph.places) - 1):
        units = slice(graph.leaving[place], graph.leaving[place + 1])
        np.minimum.at(before, graph.end[units], before[place] + costs[units])
    left: np.ndarray = before[graph.begin] + costs + least[graph.end] - onwards[0] <= known_cost
    return left
