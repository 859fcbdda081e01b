"""Dynamic programming over the division of a program into units.

The state is the place in the program and the bytes that the units before it hold, as in the dynamic programs of
Beaumont, Herrmann, Pallez (Aupy) and Shilova, "Optimal memory-aware backpropagation of deep join networks" (2020) and
"Optimal checkpointing for heterogeneous chains" (the tool rotor, 2019; persistent schedules: what is kept stays until
its backward). Here a stage that is kept or not is a unit that runs plainly, under a checkpoint, or under one that keeps
some products. Where theirs runs memory in equal steps, bytes are exact here; of more than `most_states` states at a
place, those that hold least and those that cost least in each of equal steps of memory go on. With fewer the plan is
the best.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from .bound import UnitGraph
from .unit import Unit

# in as many equal steps of memory as rotor has by default (its mem_slots), the least that is held and the least that it
# costs
MOST_STATES = 2 * 500


def solve_chain(units: Sequence[Unit], limit_bytes: int, most_states: int = MOST_STATES) -> list[Unit] | None:
    """The cheapest division whose memory stays within ``limit_bytes``; None where there is none.

    The plan begins at atom 0 and ends with the last unit.
    """

    def keep(place: int, held: np.ndarray, cost: np.ndarray) -> np.ndarray:
        """Of too many states, those that hold least and those that cost least in each step."""
        kept = undominated(held, cost)
        if len(kept) > most_states:
            step = held[kept] * (most_states // 2) // max(1, limit_bytes)
            changes = step[1:] != step[:-1]
            kept = kept[np.concatenate([[True], changes]) | np.concatenate([changes, [True]])]
        return kept

    return search_states(UnitGraph(units, limit_bytes), limit_bytes, keep)


def search_states(graph: UnitGraph, limit_bytes: int,
                  keep: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> list[Unit] | None:
    """The units of the cheapest way through ``graph`` that keeps within the limit, or None.

    ``keep(place, held, cost)`` gives the indices of the states at a place to go on from, by rising memory.
    """
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
