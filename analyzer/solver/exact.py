"""The best division of a program into units, with a proof.

A plan is a path from the first atom to the loss in a graph whose edges are units, along which memory stays within a
limit; on any graph: values that skip over units are in what units hold. Prices of memory bound its cost from below
(`bound`) and rule out most units. What is left is searched state by state (`label`); where that takes too long, it is a
mixed-integer linear program for HiGHS, through SciPy: a variable for each unit, and one for what is held at each place.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.errors import MissingExtraError

from .bound import UnitGraph, find_prices, units_left
from .chain import solve_chain
from .label import search_labels
from .unit import Unit, peak_bytes, total_cost

_LABEL_SECONDS = 20.0
_MILP_SECONDS = 30.0  # with the rest (about a second for a thousand nodes) less than a minute
_GAP = 1e-4           # a plan whose overhead is this much, relatively, above the least is optimal: HiGHS's own default


@dataclass(frozen=True)
class ExactSolution:
    """Units of the best plan found, and a bound that no plan beats."""

    units: list[Unit]
    bound: float


def solve_exact(units: Sequence[Unit], limit_bytes: int, label_seconds: float = _LABEL_SECONDS,
                milp_seconds: float = _MILP_SECONDS) -> ExactSolution | None:
    """The division of least cost whose memory stays within ``limit_bytes``; None where there is none.

    Raises MissingExtraError where the mixed-integer solver is needed, and scipy is not there.
    """
    known = solve_chain(units, limit_bytes)
    if known is None:
        return None
    cost = total_cost(known)
    if not cost:
        return ExactSolution(known, 0.0)
    graph = UnitGraph(units, limit_bytes)
    bound, prices = find_prices(graph, cost)
    left = UnitGraph([graph.units[i] for i in np.flatnonzero(units_left(graph, prices, cost * (1 + _GAP)))],
                     limit_bytes)
    found: list[Unit] | None = None
    done = cost - bound <= _GAP * cost
    if not done:
        found, done = search_labels(graph, limit_bytes, prices, cost * (1 - _GAP), label_seconds)
    if not done:
        found, milp_bound = _solve_milp(left, limit_bytes, cost, milp_seconds)
        bound = max(bound, min(milp_bound, cost))
    # HiGHS meets constraints within a tolerance
    if found is not None and total_cost(found) < cost and peak_bytes(found) <= limit_bytes:
        known, cost = found, total_cost(found)
    return ExactSolution(known, cost if done or cost - bound <= _GAP * cost else bound)


def _solve_milp(graph: UnitGraph, limit_bytes: int, known_cost: float,
                seconds: float) -> tuple[list[Unit] | None, float]:
    """The best division that HiGHS finds among these units in the time, and its bound."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise MissingExtraError(
            "method='exact': this program needs scipy, which is not installed; pip install 'torch-analyzer[solver]', "
            "or take method='chain'") from error
    size, intervals = len(graph.units), len(graph.places) - 1
    # variables: one for each unit, then the share of the limit that is held on arriving at each place but the last
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def add(terms: list[tuple[int, float]], at_least: float, at_most: float) -> None:
        for column, entry in terms:
            rows.append(len(low))
            columns.append(column)
            entries.append(entry)
        low.append(at_least)
        high.append(at_most)

    arriving: list[list[int]] = [[] for _ in graph.places]
    over: list[list[int]] = [[] for _ in graph.places]
    for j in range(size):
        arriving[graph.end[j]].append(j)
        for i in range(graph.begin[j], graph.end[j]):
            over[i].append(j)
    for i in range(intervals):
        leaving = range(graph.leaving[i], graph.leaving[i + 1])
        start = 1.0 if i == 0 else 0.0
        add([*((j, 1.0) for j in leaving), *((j, -1.0) for j in arriving[i])], start, start)
        if i:  # what is held grows by what the units that end here add
            add([(size + i, 1.0), (size + i - 1, -1.0), *((j, -float(graph.held[j])) for j in arriving[i])], 0.0, 0.0)
        add([(size + i, 1.0), *((j, float(graph.work[j])) for j in over[i])], -np.inf, 1.0)
    matrix = coo_matrix((entries, (rows, columns)), shape=(len(low), size + intervals))
    unit_cost = known_cost / 1e3  # HiGHS's tolerances are absolute
    upper = np.ones(size + intervals)
    upper[size] = 0.0
    result: Any = milp(
        np.concatenate([graph.cost / unit_cost, np.zeros(intervals)]), bounds=Bounds(np.zeros(size + intervals), upper),
        integrality=np.concatenate([np.ones(size), np.zeros(intervals)]),
        constraints=LinearConstraint(matrix, low, high), options={"time_limit": seconds, "mip_rel_gap": _GAP})
    bound = 0.0 if result.mip_dual_bound is None else max(0.0, float(result.mip_dual_bound) * unit_cost)
    if result.x is None:
        return None, bound
    return sorted((graph.units[j] for j in np.flatnonzero(result.x[:size] > 0.5)), key=lambda u: u.first), bound
