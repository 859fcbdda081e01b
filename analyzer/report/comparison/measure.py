"""Quantities of a module tree: what each module has of them, with all that is below it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analyzer.report.column import Column
from analyzer.report.quantity import find_quantity
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.units import add_quantities

_Cost = Callable[[CostInfo], float | None]


def _sum(*names: str) -> _Cost:
    return lambda costs: add_quantities(getattr(costs, name) for name in names)


def _take_time(costs: CostInfo) -> float | None:
    """Of the device, forward and backward: in kernels and waiting for the host, which measured seconds have in them."""
    return add_quantities([costs.fwd_seconds, costs.bwd_seconds, costs.launch_seconds or 0.0])


#: Those of `CostInfo`, under the name of the step's quantity; time is compared with that of the whole step.
_COSTS: tuple[tuple[Column, _Cost], ...] = (
    *[(find_quantity(name, [], "compare()"), cost) for name, cost in (
        ("params", _sum("params")), ("saved_bytes", _sum("saved_bytes")),
        ("hardware_flops", _sum("fwd_flops", "bwd_flops", "recompute_flops")),
        ("comm_bytes", _sum("fwd_comm_bytes", "bwd_comm_bytes")))],
    (Column("fwd_bwd_seconds", "Fwd and bwd time", "seconds"), _take_time),
    (Column("optimizer_seconds", "Optimizer time", "seconds"), _sum("optimizer_seconds")))


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity of the modules of two profiles."""

    column: Column
    category: str | None
    whole: str                                                 #: the step's quantity that it is a part of
    read: Callable[[int, ModuleInfo], float | None]            #: (0 for the first profile, 1 for the second; module)


def list_measures(before: Profile, after: Profile) -> Iterator[Measure]:
    """The quantities whose change modules explain: costs, and bytes at the peak by category."""
    for column, cost in _COSTS:
        yield Measure(column, None, "step_seconds" if column.unit == "seconds" else column.field, _read_cost(cost))
    if any(profile.out_of_memory is not None or not profile.holders for profile in (before, after)):
        return  # what is held where memory ran out is not what is held at the peak
    for category in dict.fromkeys([*before.peak_by_category, *after.peak_by_category]):
        held = [_add_up(profile, category) for profile in (before, after)]
        column = Column(f"peak_by_category.{category}", f"Peak: {category}", "bytes")
        yield Measure(column, category, "peak_allocated_bytes", _read_held(held[0], held[1]))


def _read_cost(cost: _Cost) -> Callable[[int, ModuleInfo], float | None]:
    return lambda side, module: cost(module)


def _read_held(before: dict[str, int], after: dict[str, int]) -> Callable[[int, ModuleInfo], float | None]:
    held = before, after
    return lambda side, module: held[side].get(module.path, 0)


def _add_up(profile: Profile, category: str) -> dict[str, int]:
    """Bytes of a category at the peak by module, each with those below it."""
    found: dict[str, int] = {}
    for holder in profile.holders:
        if holder.category == category:
            path = holder.module_path
            while path:
                found[path] = found.get(path, 0) + holder.bytes
                path = path.rpartition(".")[0]
            found[""] = found.get("", 0) + holder.bytes
    return found
