"""The module tree as data of a page."""
from __future__ import annotations

from typing import Any

from analyzer.report.module_row import list_rows
from analyzer.results.info import CostInfo
from analyzer.results.profile import Profile
from analyzer.units import add_quantities

#: What the chart and the table of modules show: title, unit, and the fields that add up to it. The chart shows the
#: first seven that are known.
QUANTITIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Time", "seconds", ("fwd_seconds", "bwd_seconds")),
    ("FLOPs", "count", ("fwd_flops", "bwd_flops", "recompute_flops")),
    ("Saved for backward", "bytes", ("saved_bytes",)),
    ("Activations", "bytes", ("activation_bytes",)),
    ("Parameter size", "bytes", ("param_bytes",)),
    ("Communication", "bytes", ("fwd_comm_bytes", "bwd_comm_bytes")),
    ("Exposed communication", "seconds", ("exposed_comm_seconds",)),
    ("Parameters", "count", ("params",)),
    ("Fwd FLOPs", "count", ("fwd_flops",)), ("Bwd FLOPs", "count", ("bwd_flops",)),
    ("Fwd time", "seconds", ("fwd_seconds",)), ("Bwd time", "seconds", ("bwd_seconds",)))


def describe_modules(profile: Profile) -> dict[str, Any] | None:
    """The rows of the tree, parents first, what a module does itself as a row of its own, each with its quantities;
    None without a tree. A quantity that is nothing, or nowhere known, is left out.
    """
    if profile.modules is None:
        return None
    rows = list(list_rows(profile.modules))
    quantities = []
    for title, unit, fields in QUANTITIES:
        values = [_add(row.costs, fields) for row in rows]
        if any(values):
            quantities.append({"title": title, "unit": unit, "values": values})
    return {"name": [row.name for row in rows], "type": [row.type for row in rows],
            "path": [None if row.module is None else row.module.path for row in rows],
            "depth": [row.depth - rows[0].depth for row in rows],
            "calls": [None if row.module is None else row.module.calls for row in rows], "quantities": quantities}


def _add(costs: CostInfo, fields: tuple[str, ...]) -> float | None:
    return add_quantities([getattr(costs, field) for field in fields])
