"""Overhead against budget: as a table, and drawn."""
from __future__ import annotations

import io
from pathlib import Path

from analyzer.errors import InputError, MissingExtraError
from analyzer.output import write_output
from analyzer.units import format_bytes

from .plan import Plan


def format_frontier(plan: Plan) -> str:
    """A row for each budget of ``plan.frontier``: the peak reached and the overhead."""
    from analyzer.report.column import print_rows

    rows = [(format_bytes(p.budget_bytes), format_bytes(p.peak_bytes), plan.format_cost(
        p.overhead), share_of_cost(plan, p.overhead)) for p in plan.frontier]
    return print_rows(("Budget", "Peak reached", "Overhead",
                       "Of the step" if plan.objective == "seconds" else "Of the forward pass"), rows, left=())


def share_of_cost(plan: Plan, overhead: float | None) -> str:
    """``overhead`` as a share of the step's seconds without the plan, or of the FLOPs of its forward pass."""
    whole = plan.unplanned.seconds if plan.objective == "seconds" else plan.unplanned.fwd_flops
    return "-" if overhead is None or not whole else f"{overhead / whole:.2%}"


def draw_frontier(plan: Plan, path: str | Path) -> None:
    """Draw ``plan.frontier`` and the plan itself to a file, whose ending says the format.

    Raises MissingExtraError without matplotlib, InputError for a plan without a frontier or an unknown format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "drawing a frontier: matplotlib is not installed; pip install 'torch-analyzer[report]'") from error
    if not plan.frontier:
        raise InputError(
            "draw_frontier(): the plan has no frontier; make one with Planner.frontier and dataclasses.replace(plan, "
            "frontier=...)")
    whole = plan.unplanned.seconds if plan.objective == "seconds" else plan.unplanned.fwd_flops
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    known = [(p.peak_bytes / 2**30, 100 * p.overhead / whole) for p in plan.frontier
             if p.overhead is not None and whole]
    axes.plot(*zip(*known), marker="o", drawstyle="steps-pre", label="plans")
    if plan.planned is not None and plan.overhead is not None and whole:
        peak = plan.planned.peak_bytes if plan.budget_of == "step" else plan.planned.peak_activation_bytes
        axes.plot([peak / 2**30], [100 * plan.overhead / whole], marker="*", markersize=14, linestyle="",
                  label="this plan")
    axes.set_xlabel("peak memory of " + ("the step" if plan.budget_of == "step" else "activations") + ", GiB")
    axes.set_ylabel("overhead, % of the " + ("step's time" if plan.objective == "seconds" else "forward pass's FLOPs"))
    axes.set_title(plan.model)
    axes.grid(alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=Path(path).suffix.removeprefix(".") or None)
    except ValueError as error:  # an ending that is no format
        raise InputError(f"draw_frontier({str(path)!r}): {error}") from error
    write_output(path, drawn.getvalue())
