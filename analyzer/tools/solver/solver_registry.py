"""Where solvers are registered, and what is asked of the division that one returns."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from analyzer.errors import InputError
from analyzer.registry import Call, Registry, check_name
from analyzer.units import format_bytes

from .chain import solve_chain
from .exact import solve_exact
from .unit import Division, Unit, peak_bytes

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

    >>> from analyzer.tools.solver.unit import Unit
    >>> def checkpoint_all(units, limit_bytes):
    ...     chosen = [u for u in units if u.is_region]
    ...     return chosen if peak_bytes(chosen) <= limit_bytes else None
    >>> run, again = Unit(0, 3, False, 0.0, 8, 8), Unit(0, 3, True, 64.0, 2, 8)
    >>> with register_solver.scope():                             # without it, for as long as the process runs
    ...     _ = register_solver("all", checkpoint_all)
    ...     solve_units([run, again], 8, "all").units == [again]
    True
    """

    def look_up(self, method: object, given: str) -> Solver:
        """The solver of that name. Raises InputError, which begins with ``given``, for what is none."""
        found = self.find(method) if isinstance(method, str) else None
        if found is None:
            raise InputError(f"{given}: must be one of {', '.join(self)}; register_solver adds one")
        return found


register_solver = SolverRegistry("register_solver", check_name, Call("f(units, limit_bytes)", 2))
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
    _check_division(division.units, units, limit, f"method={method!r}: its solver")
    return division


def _check_division(chosen: object, units: Sequence[Unit], limit: int, solver: str) -> None:
    if not isinstance(chosen, list):
        raise InputError(f"{solver} returned {chosen!r:.200}: must be a list of units that it was given, or None where "
                         "it finds none within the limit")
    known = set(units)
    for unit in chosen:
        if not isinstance(unit, Unit) or unit not in known:
            raise InputError(f"{solver} returned a list with {unit!r:.200}: must be of units that it was given")
    end = max(u.last for u in units) + 1
    begins, ends = [0, *(u.last + 1 for u in chosen)], [*(u.first for u in chosen), end]
    for place, following in zip(begins, ends, strict=True):
        if place != following:
            what = "none follows" if following == end else f"one that begins at {following} follows"
            raise InputError(f"{solver} returned units that leave a gap or overlap: they must follow each other from "
                             f"atom 0 to {end - 1}, and where one is to begin at {place}, {what}")
    peak = peak_bytes(chosen)
    if peak > limit:
        raise InputError(f"{solver} returned units that take {peak:,} bytes ({format_bytes(peak)}), above the limit of "
                         f"{limit:,} bytes ({format_bytes(limit)}) that it was given: it must return None where it "
                         "finds none within it")
