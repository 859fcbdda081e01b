"""A plan as parts of a page: memory without and with it, what it keeps of each module, checkpoints, frontier."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from .application import PlanRegion
from .recorded_step import FrontierPoint, StepInfo, StepMemory


def describe_plan_memory(unplanned: StepInfo, planned: StepInfo | None, budget_bytes: int, budget_of: str,
                         held_bytes: int, update_bytes: int) -> dict[str, Any] | None:
    """Memory over the step without a plan and with it; None where the steps were not recorded call by call."""
    if unplanned.memory is None:
        return None
    return {"without": _curve(unplanned.memory), "budget": budget_bytes, "budget_of": budget_of, "held": held_bytes,
            "with": None if planned is None or planned.memory is None else _curve(planned.memory),
            "update": update_bytes}


def _curve(memory: StepMemory) -> dict[str, Any]:
    names = dict.fromkeys(memory.nodes)
    places = {name: i for i, name in enumerate(names)}
    return {"activations": memory.activation_bytes, "others": memory.other_bytes, "names": list(names),
            "node": [places[name] for name in memory.nodes], "forward": memory.forward_points}


def describe_kept(unplanned: StepInfo, planned: StepInfo | None,
                  regions: Sequence[PlanRegion]) -> dict[str, Any] | None:
    """The modules, parents first, with what each saves for backward without the plan and with it, and how many of its
    nodes that save something without the plan run under a checkpoint. None where it is not known.
    """
    if unplanned.memory is None or planned is None or planned.memory is None:
        return None
    under = {name for region in regions for name in region.nodes}
    rows: dict[tuple[str, ...], dict[str, int]] = {}
    _add(rows, "before", ((entry.module_path, entry.bytes) for entry in unplanned.memory.saved))
    _add(rows, "after", ((entry.module_path, entry.bytes) for entry in planned.memory.saved))
    _add(rows, "checkpointed", ((entry.module_path, 1) for entry in unplanned.memory.saved if entry.node in under))
    if not rows:
        return None
    ordered = sorted(rows, key=lambda path: [_natural(name) for name in path])
    return {"path": [".".join(path) for path in ordered], "depth": [len(path) for path in ordered],
            **{name: [rows[path].get(name, 0) for path in ordered]
               for name in ("before", "after", "checkpointed")}}


def _prefixes(path: str) -> Iterable[tuple[str, ...]]:
    """A module and all around it, the model first."""
    return accumulate(([name] for name in path.split(".") if name), lambda above, name: (*above, *name), initial=())


def _add(rows: dict[tuple[str, ...], dict[str, int]], column: str, found: Iterable[tuple[str, int]]) -> None:
    """Add quantities of modules to these and to all around them."""
    for module_path, quantity in found:
        for path in _prefixes(module_path):
            row = rows.setdefault(path, {})
            row[column] = row.get(column, 0) + quantity


def _natural(name: str) -> tuple[int, int, str]:
    """Numbers in their order, before names."""
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)


def describe_regions(regions: Sequence[PlanRegion], unit: str) -> dict[str, Any] | None:
    """The checkpoints by column; ``unit`` is that of what running them again costs. None where there are none."""
    if not regions:
        return None
    return {"unit": unit, "first": [r.nodes[0] for r in regions], "last": [r.nodes[-1] for r in regions],
            "module": [r.module_path or "" for r in regions], "nodes": [list(r.nodes) for r in regions],
            "kept": [len(r.keeps) for r in regions], "products": [r.products for r in regions],
            "cost": [r.cost for r in regions]}


def describe_frontier(points: Sequence[FrontierPoint], unit: str, whole: float | None, own_peak: int | None,
                      own_overhead: float | None) -> dict[str, Any] | None:
    """The budgets that plans were sought for, with the peak and the overhead of each, a share of ``whole``; and the
    point of the plan itself. None without any.
    """
    if not points:
        return None
    return {"unit": unit, "whole": whole, "own": {"peak": own_peak, "overhead": own_overhead},
            "budget": [point.budget_bytes for point in points], "peak": [point.peak_bytes for point in points],
            "overhead": [point.overhead for point in points]}
