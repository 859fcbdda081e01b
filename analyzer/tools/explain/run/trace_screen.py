"""A trace in words."""
from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean, cut_middle
from analyzer.units import format_seconds

from ..prediction import Prediction
from .trace_report import TimeRow, TraceReport

_LARGEST = 5     # differences, and operators that are not predicted
_FEWER = 4       # kernels, classes of modules
_NAME_WIDTH, _SHORT_WIDTH = 60, 40


def print_trace(name: str, report: TraceReport, prediction: Prediction | None) -> str:
    """What a step is spent on, and where it differs most from the prediction."""
    steps = "whole, for nothing in it marks a step (no ProfilerStep, no Optimizer.step)" if report.steps is None else (
        f"{report.steps:,} step{'s' * (report.steps > 1)}; all figures are of one")
    head = [fill(f"{clean(name)}: trace of torch.profiler, {steps}", 120)]
    if prediction is not None:
        head.append(fill(f"against {clean(prediction.name)} on {clean(prediction.device)}", 120))
    if not report.is_on_device:
        head.append("no kernels of a device in it: times are those of operators on the host, without what they call")
    parts = ["\n".join(head), _table("Of a step" if report.steps else "Of the trace", report.totals, prediction)]
    known = [row for row in report.operators if row.predicted is not None]
    if prediction is not None:
        known.sort(key=lambda row: -abs((row.seconds or 0.0) - (row.predicted or 0.0)))
        if known:
            parts.append(_table("Largest differences", known[:_LARGEST], prediction))
    else:
        parts.append(_table("Operator", report.operators[:_LARGEST], None))
    if report.kernels:
        parts.append(_table("Kernel", report.kernels[:_FEWER], None))
    if report.modules and any(row.seconds for row in report.modules):
        parts.append(_table("Module's class, in forward", report.modules[:_FEWER], prediction))
    if prediction is not None:
        others = [row for row in report.operators if row.predicted is None and row.seconds]
        named = ", ".join(f"{clean(cut_middle(row.name, _SHORT_WIDTH))} {format_seconds(row.seconds)} ({row.calls:g})"
                          for row in others[:_LARGEST])
        more = f" and {len(others) - _LARGEST:,} more" if len(others) > _LARGEST else ""
        parts.append(fill(f"in the run and not predicted (calls): {named}{more}" if others else
                          "all operators of the run are predicted", 120, subsequent_indent="  "))
    return "\n\n".join(parts)


def _table(title: str, rows: Sequence[TimeRow], prediction: Prediction | None) -> str:
    headers = [title, "Calls", "Run", *(["Predicted", "Ratio"] if prediction is not None else [])]
    cells = [[cut_middle(row.name, _NAME_WIDTH), "" if row.calls is None else f"{row.calls:,.6g}",
              format_seconds(row.seconds),
              *([format_seconds(row.predicted), f"{row.seconds / row.predicted:.2f}" if row.predicted and
                 row.seconds is not None else "-"] if prediction is not None else [])] for row in rows]
    return print_rows(headers, cells, left=(0,))
