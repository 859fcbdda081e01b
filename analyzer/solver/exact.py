"""The best division of a program into units as a mixed-integer linear program, solved by HiGHS through SciPy.

A plan is a path from the first atom to the loss in a graph whose edges are units; the bytes held at each place are a variable, and a unit
may be taken only where they and what it needs are within the limit. On any graph: values that skip over units are in what units hold.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analyzer.errors import MissingExtraError

from .chain import solve_chain
from .unit import Unit, peak_bytes

_SECONDS = 50.0       # of the solver
_GAP = 1e-4           # a plan whose overhead is this much, relatively, above the least is optimal: HiGHS's own default


@dataclass(frozen=True)
class ExactSolution:
    """Units of the best plan found, and a bound that no plan beats."""

    units: list[Unit]
    bound: float


def solve_exact(units: Sequence[Unit], limit_bytes: int, seconds: float = _SECONDS) -> ExactSolution | None:
    """The division of least cost whose memory stays within ``limit_bytes``; None where there is none.

    Raises MissingExtraError without scipy.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise MissingExtraError("method='exact': scipy is not installed; pip install 'torch-analyzer[solver]', or take method='chain'") from error

    known = solve_chain(units, limit_bytes)
    if known is None:
        return None
    units = [u for u in units if u.work_bytes <= limit_bytes]
    best_known = sum(u.cost for u in known)
    places = sorted({u.first for u in units} | {u.last + 1 for u in units})
    index = {place: i for i, place in enumerate(places)}
    count, size = len(places), len(units)
    scale = max(1, limit_bytes)
    # variables: one for each unit, then the share of the limit that is held on arriving at each place
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

    leaving: list[list[int]] = [[] for _ in places]
    arriving: list[list[int]] = [[] for _ in places]
    for j, u in enumerate(units):
        leaving[index[u.first]].append(j)
        arriving[index[u.last + 1]].append(j)
    for i in range(count):
        balance = 1.0 if i == 0 else -1.0 if i == count - 1 else 0.0
        add([*((j, 1.0) for j in leaving[i]), *((j, -1.0) for j in arriving[i])], balance, balance)
        if i:  # what is held grows by what the units that end here add
            add([(size + i, 1.0), (size + i - 1, -1.0), *((j, -units[j].held_bytes / scale) for j in arriving[i])], 0.0, 0.0)
        if leaving[i]:
            add([(size + i, 1.0), *((j, units[j].work_bytes / scale) for j in leaving[i])], -np.inf, limit_bytes / scale)
    matrix = coo_matrix((entries, (rows, columns)), shape=(len(low), size + count))
    unit_cost = best_known / 1e3 if best_known > 0 else 1.0  # HiGHS's tolerances are absolute
    cost = np.concatenate([[u.cost / unit_cost for u in units], np.zeros(count)])
    upper = np.concatenate([np.ones(size + 1), np.ones(count - 1)])
    upper[size] = 0.0
    result: Any = milp(cost, integrality=np.concatenate([np.ones(size), np.zeros(count)]), bounds=Bounds(np.zeros(size + count), upper),
                       constraints=LinearConstraint(matrix, low, high), options={"time_limit": seconds, "mip_rel_gap": _GAP})
    bound = 0.0 if result.mip_dual_bound is None else max(0.0, float(result.mip_dual_bound) * unit_cost)
    if result.x is None:
        return ExactSolution(known, min(bound, best_known))
    chosen = [units[j] for j in np.flatnonzero(result.x[:size] > 0.5)]
    chosen.sort(key=lambda u: u.first)
    found = sum(u.cost for u in chosen)
    if found > best_known or peak_bytes(chosen) > limit_bytes:  # HiGHS meets constraints within a tolerance
        chosen, found = known, best_known
    return ExactSolution(chosen, found if found - bound <= _GAP * found else bound)


