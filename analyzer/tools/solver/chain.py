"""Solvers of the division into units."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from .unit import Unit

# A bound from a Lagrangian relaxation: instead of keeping each atom within the limit, each byte at it has a price, each
# of the limit is paid back at it. Then the cheapest division is a shortest path, and costs no more than the cheapest
# one that keeps to the limit, at whatever prices. Good prices are found by following subgradients (Held, Wolfe and
# Crowder, "Validation of subgradient optimization", 1974). The same prices bound what any rest of a division costs,
# given what is held before it: see `solver_registry`.

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
        """What no division costs less than, by these prices; and by how much the price of each interval is to rise."""
        costs, onwards = self.charge(prices)
        least, path = self.shortest(costs)
        excess, held = np.zeros(len(self.places) - 1), 0.0
        for i in path:
            excess[self.begin[i]:self.end[i]] = held + self.work[i] - 1
            held += self.held[i]
        return float(least[0] - onwards[0]), excess


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


# The state is the place in the program and the bytes that the units before it hold, as in the dynamic programs of
# Beaumont, Herrmann, Pallez (Aupy) and Shilova, "Optimal memory-aware backpropagation of deep join networks" (2020) and
# "Optimal checkpointing for heterogeneous chains" (the tool rotor, 2019; persistent schedules: what is kept stays until
# its backward). Here a stage that is kept or not is a unit that runs plainly, under a checkpoint, or under one that
# keeps some products. Where theirs runs memory in equal steps, bytes are exact here; of more than `most_states` states
# at a place, those that hold least and those that cost least in each of equal steps of memory go on. With fewer the
# plan is the best.

# in as many equal steps of memory as rotor has by default (its mem_slots), the least that is held and the least that it
# costs
MOST_STATES = 2 * 500


def solve_chain(units: Sequence[Unit], limit_bytes: int, most_states: int = MOST_STATES) -> list[Unit] | None:
    """The cheapest division whose memory stays within ``limit_bytes``; None where there is none."""

    def keep(place: int, held: np.ndarray, cost: np.ndarray) -> np.ndarray:
        kept = undominated(held, cost)
        if len(kept) > most_states:
            step = held[kept] * (most_states // 2) // max(1, limit_bytes)
            changes = step[1:] != step[:-1]
            kept = kept[np.concatenate([[True], changes]) | np.concatenate([changes, [True]])]
        return kept

    return search_states(UnitGraph(units, limit_bytes), limit_bytes, keep)


def search_states(graph: UnitGraph, limit_bytes: int,
                  keep: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> list[Unit] | None:
    """The units of the cheapest way within the limit, or None; ``keep`` gives the states to go on from, by memory."""
    # of each state: bytes held, cost, the unit that led there, and from which of the states where that begins
    arrived = {0: [(np.zeros(1, dtype=np.int64), np.zeros(1), np.full(1, -1), np.full(1, -1))]}
    fixed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
    for place in range(len(graph.places)):
        if place not in arrived:
            continue
        held, cost, via, state = (np.concatenate(parts) for parts in zip(*arrived.pop(place)))
        kept = keep(place, held, cost)
        held, cost, via, state = fixed[place] = held[kept], cost[kept], via[kept], state[kept]
        for i in range(graph.leaving[place], graph.leaving[place + 1]):
            u = graph.units[i]
            fits = int(np.searchsorted(held, limit_bytes - u.work_bytes, side="right"))
            if fits:
                arrived.setdefault(int(graph.end[i]), []).append(
                    (held[:fits] + u.held_bytes, cost[:fits] + u.cost, np.full(fits, i), np.arange(fits)))
    place = len(graph.places) - 1
    if place not in fixed or not len(fixed[place][0]):
        return None
    at = int(np.argmin(fixed[place][1]))
    found = []
    while place:
        _, _, via, state = fixed[place]
        i = int(via[at])
        found.append(graph.units[i])
        place, at = int(graph.begin[i]), int(state[at])
    return found[::-1]


def undominated(held: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Indices of the states that no other beats in both, by rising memory."""
    order = np.lexsort((cost, held))
    best = np.minimum.accumulate(cost[order])
    keep: np.ndarray = order[np.concatenate([[True], cost[order][1:] < best[:-1]])[:len(order)]]
    return keep


def least_limit(units: Sequence[Unit]) -> int:
    """The smallest limit under which there is a plan, to the byte, by the units' own account."""
    ordered = sorted(units, key=lambda u: u.first)
    goal = max(u.last for u in units) + 1

    def is_enough(limit: int) -> bool:
        least = {0: 0}  # bytes held on arriving at each place
        for u in ordered:
            held = least.get(u.first)
            if held is not None and held + u.work_bytes <= limit:
                least[u.last + 1] = min(held + u.held_bytes, least.get(u.last + 1, held + u.held_bytes))
        return goal in least

    most = sum(u.held_bytes for u in units) + max(u.work_bytes for u in units)
    return bisect_left(range(most), True, key=is_enough)
