"""The best division of a program into units, with a proof; and where solvers are registered, and what is asked of the
division that one returns.

A plan is a path from the first atom to the loss in a graph whose edges are units, along which memory stays within a
limit; on any graph: values that skip over units are in what units hold. Prices of memory bound its cost from below
(`chain.find_prices`) and rule out most units. What is left is searched state by state, as in `chain`, but none is given
up for want of room: a state is left where what the rest of the program costs at least makes no division cheaper than
the one known (labels with completion bounds: Beasley and Christofides, "An algorithm for the resource constrained
shortest path problem", 1989). Where that takes too long, it is a mixed-integer linear program for HiGHS, through SciPy:
a variable for each unit, and one for what is held at each place.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from analyzer.errors import InputError, MissingExtraError, how_to_install
from analyzer.registry import Form, Registry, check_name
from analyzer.units import format_bytes

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
    """The cheapest division within the limit, or None. Raises MissingExtraError where scipy is needed."""
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
            "method='exact': this program needs scipy, which is not installed; "
            f"{how_to_install('solver')}, or take method='chain'") from error
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


Solver = Callable[[list[Unit], int], Division | list[Unit] | None]


class SolverRegistry(Registry[str, Solver]):
    """Solvers by the name that ``solve(method=...)`` and ``analyzer plan --method`` take.

    A solver gets a list of `Unit` and a limit of memory in bytes. A unit stands for the atoms ``first`` to ``last`` of
    the program, run plainly or under a checkpoint (``is_region``): ``cost`` is what running it again takes, in FLOPs,
    or in seconds where the plan is for a device; ``held_bytes`` is what it adds to memory until its backward has run,
    ``work_bytes`` the most that it needs on top of what the units before it hold. The solver returns a list of those
    that it chose, which follow each other from atom 0 to the last of all and stay within the limit, or None where it
    finds none; ``peak_bytes`` and ``total_cost`` are the memory and the cost of such a list. One that knows a cost that
    no division has less than returns a `Division` of the list and that bound (all four are in
    `analyzer.tools.solver.unit`). It is asked several times, with limits that close in on the budget. Where none of its
    plans is within the budget, that of least memory is tried, by ``"chain"``.
    """

    def look_up(self, method: object, given: str) -> Solver:
        """The solver of that name. Raises InputError, which begins with ``given``, for what is none."""
        found = self.find(method) if isinstance(method, str) else None
        if found is None:
            raise InputError(f"{given}: must be one of {', '.join(self)}; register_solver adds one")
        return found


register_solver = SolverRegistry("register_solver", check_name, Form("f(units, limit_bytes)", 2))
"""Register a way to solve plans: a function of a list of `analyzer.tools.solver.unit.Unit` and a limit in bytes
that returns a list of some of them, or None. `SolverRegistry` says what is asked of it."""
register_solver("auto", solve_chain)
register_solver("chain", solve_chain)
register_solver("exact", solve_exact)


def solve_units(units: Sequence[Unit], limit: int, method: str) -> Division | None:
    """Units within the limit by the solver of that name. Raises InputError for a result that is no such division."""
    found = register_solver.look_up(method, f"method={method!r}")(list(units), limit)
    if found is None:
        return None
    division = found if isinstance(found, Division) else Division(found)
    if error := _find_fault(division.units, units, limit):
        raise InputError(f"method={method!r}: its solver returned {error}")
    return division


def _find_fault(chosen: object, units: Sequence[Unit], limit: int) -> str:
    """What is wrong with a division; empty where nothing is."""
    if not isinstance(chosen, list):
        return (f"{chosen!r:.200}: must be a list of units that it was given, or None where it finds none within the "
                "limit")
    known = set(units)
    for unit in chosen:
        if not isinstance(unit, Unit) or unit not in known:
            return f"a list with {unit!r:.200}: must be of units that it was given"
    end = max(u.last for u in units) + 1
    begins, ends = [0, *(u.last + 1 for u in chosen)], [*(u.first for u in chosen), end]
    for place, following in zip(begins, ends, strict=True):
        if place != following:
            what = "none follows" if following == end else f"one that begins at {following} follows"
            return (f"units that leave a gap or overlap: they must follow each other from atom 0 to {end - 1}, and "
                    f"where one is to begin at {place}, {what}")
    if (peak := peak_bytes(chosen)) > limit:
        return (f"units that take {peak:,} bytes ({format_bytes(peak)}), above the limit of {limit:,} bytes "
                f"({format_bytes(limit)}) that it was given: it must return None where it finds none within it")
    return ""
