"""Every division that may be the best one, place by place: the exact method for shortest paths with a limit.

As in `chain`, a state is a place and the bytes held there, but none is given up for want of room. What keeps them few
are bounds on what the rest of the program costs after each state (`bound`): a state that cannot lead to a cheaper
division than the one known is left. (Labels with completion bounds: Beasley and Christofides, "An algorithm for the
resource constrained shortest path problem", 1989.)
"""
from __future__ import annotations

import time

import numpy as np

from .bound import UnitGraph
from .chain import trace_back, undominated
from .unit import Unit

# of the prices: a bound for states that hold much, others for those that hold little
_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
_MOST_LABELS = 10**7  # in all: a gigabyte


def search_labels(graph: UnitGraph, limit_bytes: int, prices: np.ndarray, below: float,
                  seconds: float) -> tuple[list[Unit] | None, bool]:
    """The cheapest division within the limit below the cost ``below``, or None; whether all were seen in the time."""
    ends = time.perf_counter() + seconds
    rests = []
    for scale in _SCALES:
        costs, onwards = graph.charge(scale * prices)
        rests.append((graph.shortest(costs)[0] - onwards, onwards / max(1, limit_bytes)))
    goal = len(graph.places) - 1
    arrived = {0: [(np.zeros(1, dtype=np.int64), np.zeros(1), np.full(1, -1), np.full(1, -1))]}
    fixed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
    count = 0
    for place in range(goal + 1):
        if place not in arrived:
            continue
        if time.perf_counter() > ends or count > _MOST_LABELS:
            return None, False
        held, cost, via, state = (np.concatenate(parts) for parts in zip(*arrived.pop(place)))
        hopeful = np.flatnonzero(
            np.max([cost + least[place] + price[place] * held for least, price in rests], axis=0) < below)
        keep = hopeful[undominated(held[hopeful], cost[hopeful])]
        if not len(keep):
            continue
        held, cost, via, state = fixed[graph.places[place]] = held[keep], cost[keep], via[keep], state[keep]
        count += len(keep)
        for i in range(graph.leaving[place], graph.leaving[place + 1]):
            u = graph.units[i]
            fits = int(np.searchsorted(held, limit_bytes - u.work_bytes, side="right"))
            if fits:
                arrived.setdefault(int(graph.end[i]), []).append(
                    (held[:fits] + u.held_bytes, cost[:fits] + u.cost, np.full(fits, i), np.arange(fits)))
    if graph.places[goal] not in fixed:
        return None, True
    return trace_back(graph.units, fixed, graph.places[goal]), True
