"""The best division of a program into units, with a proof.

A plan is a path from the first atom to the loss in a graph whose edges are units, along which memory stays within a
limit; on any graph: values that skip over units are in what units hold. Prices of memory bound its cost from below
(`bound`) and rule out most units. What is left is searched state by state, as in `chain`, but none is given up for want
of room: a state is left where what the rest of the program costs at least makes no division cheaper than the one known
(labels with completion bounds: Beasley and Christofides, "An algorithm for the resource constrained shortest path
problem", 1989). Where that takes too long, it is a mixed-integer linear program for HiGHS, through SciPy: a variable
for each unit, and one for what is held at each place.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from analyzer.errors import MissingExtraError

from .chain import UnitGraph, find_prices, search_states, solve_chain, undominated, units_left
from .unit import Division, Unit, peak_bytes, total_cost

_LABEL_SECONDS = 20.0
# of the prices: a bound for states that hold much, others for those that hold little
_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
_MOST_LABELS = 10**7  # in all: a gigabyte
_MILP_SECONDS = 30.0  # with the rest (about a second for a thousand nodes) less than a minute
_GAP = 1e-4           # a plan whose overhead is this much, relatively, above the least is optimal: HiGHS's own default


def solve_exact(units: Sequence[Unit], limit_bytes: int, label_seconds: float = _LABEL_SECONDS,
                milp_seconds: float = _MILP_SECONDS) -> Division | None:
    """The division of least cost whose memory stays within ``limit_bytes``; None where there is none.

    Raises MissingExtraError where the mixed-integer solver is needed, and scipy is not there.
    """
    known = solve_chain(units, limit_bytes)
    if known is None:
        return None
    cost = total_cost(known)
    if not cost:
        return Division(known, 0.0)
    graph = UnitGraph(units, limit_bytes)
    bound, prices = find_prices(graph, cost)
    left = UnitGraph([graph.units[i] for i in np.flatnonzero(units_left(graph, prices, cost * (1 + _GAP)))],
                     limit_bytes)
    found: list[Unit] | None = None
    done = cost - bound <= _GAP * cost
    if not done:
        found, done = _search_labels(graph, limit_bytes, prices, cost * (1 - _GAP), label_seconds)
    if not done:
        found, milp_bound = _solve_milp(left, limit_bytes, cost, milp_seconds)
        bound = max(bound, min(milp_bound, cost))
    # HiGHS meets constraints within a tolerance
    if found is not None and total_cost(found) < cost and peak_bytes(found) <= limit_bytes:
        known, cost = found, total_cost(found)
    return Division(known, cost if done or cost - bound <= _GAP * cost else bound)


class _TooMany(Exception):
    """More states than there is time or room for."""


def _search_labels(graph: UnitGraph, limit_bytes: int, prices: np.ndarray, below: float,
                  seconds: float) -> tuple[list[Unit] | None, bool]:
    """The cheapest division within the limit below the cost ``below``, or None; whether all were seen in the time."""
    ends = time.perf_counter() + seconds
    rests = []
    for scale in _SCALES:
        costs, onwards = graph.charge(scale * prices)
        rests.append((graph.shortest(costs)[0] - onwards, onwards / max(1, limit_bytes)))
    count = 0

    def keep(place: int, held: np.ndarray, cost: np.ndarray) -> np.ndarray:
        nonlocal count
        if time.perf_counter() > ends or count > _MOST_LABELS:
            raise _TooMany
        hopeful = np.flatnonzero(
            np.max([cost + least[place] + price[place] * held for least, price in rests], axis=0) < below)
        kept: np.ndarray = hopeful[undominated(held[hopeful], cost[hopeful])]
        count += len(kept)
        return kept

    try:
        return search_states(graph, limit_bytes, keep), True
    except _TooMany:
        return None, False


def _solve_milp(graph: UnitGraph, limit_bytes: int, known_cost: float,
                seconds: float) -> tuple[list[Unit] | None, float]:
    """The best division that HiGHS finds among these units in the time, and its bound."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix, eye, hstack
    except ImportError as error:
        raise MissingExtraError(
            "method='exact': this program needs scipy, which is not installed; pip install "
            "'symbolic-analyzer[solver]', or take method='chain'") from error
    # variables: one for each unit, then the share of the limit that is held on arriving at each place but the last
    size, intervals = len(graph.units), len(graph.places) - 1
    places = np.arange(intervals)[:, None]
    begins, ends, covers = (coo_matrix(which, dtype=float) for which in (
        graph.begin == places, graph.end == places, (graph.begin <= places) & (places < graph.end)))
    held = eye(intervals)
    start = places[:, 0] == 0
    constraints = [
        LinearConstraint(hstack([begins - ends, 0 * held]), start, start),
        # what is held grows by what the units that end at a place add
        LinearConstraint(hstack([-ends.multiply(graph.held), held - eye(intervals, k=-1)]), 0, 0),
        LinearConstraint(hstack([covers.multiply(graph.work), held]), -np.inf, 1)]
    unit_cost = known_cost / 1e3  # HiGHS's tolerances are absolute
    result: Any = milp(
        np.concatenate([graph.cost / unit_cost, np.zeros(intervals)]), bounds=Bounds(0, 1), constraints=constraints,
        integrality=np.concatenate([np.ones(size), np.zeros(intervals)]),
        options={"time_limit": seconds, "mip_rel_gap": _GAP})
    bound = 0.0 if result.mip_dual_bound is None else max(0.0, float(result.mip_dual_bound) * unit_cost)
    if result.x is None:
        return None, bound
    return sorted((graph.units[j] for j in np.flatnonzero(result.x[:size] > 0.5)), key=lambda u: u.first), bound
