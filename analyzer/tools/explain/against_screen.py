"""A run held against a prediction, as text."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean, cut_middle
from analyzer.results.verdict import Advice
from analyzer.units import format_bytes

from .comparison import HeldAlone, PeakComparison
from .oom_screen import OwnersOfMemory
from .oom_text import OutOfMemoryText
from .prediction import PredictedFailure, Prediction
from .recording.line import describe_frames, file_of

_ROWS = 8
_LINE_WIDTH = 66
_EXPLAINS = 0.7  # of what one side holds alone: an option must leave less to be told


def describe_comparison(found: PeakComparison, prediction: Prediction) -> str:
    """What the run and the prediction hold at their peaks."""
    same = "" if not found.both_same_line_bytes else (
        f", of which {format_bytes(found.both_same_line_bytes)} at the same line")
    same += "" if not found.recorded_bytes else (
        f"; of {format_bytes(found.recorded_bytes)} whose allocation was recorded, "
        f"{format_bytes(found.in_order_bytes)} are made in the same order and {format_bytes(found.same_life_bytes)} "
        "live as long")
    alone = sum(row.total_bytes for row in found.only_run)
    before = sum(row.total_bytes for row in found.before)
    predicted = sum(row.total_bytes for row in found.only_predicted)
    lines = [f"against {clean(prediction.name)} on {clean(prediction.device)}: {format_bytes(found.run_bytes)} held at "
             f"the run's peak, {format_bytes(found.predicted_bytes)} at the predicted one",
             f"held in both: {format_bytes(found.both_bytes)}{same}",
             f"only in the run: {format_bytes(alone)}{_name_first(found.only_run)}",
             f"only predicted: {format_bytes(predicted)}{_name_first(found.only_predicted)}",
             f"before recording began, and not predicted: {format_bytes(before)}; no prediction can know their lines",
             *[f"this would explain it: {hint}" for hint in found.hints]]
    parts = ["\n".join(fill(line, 120, subsequent_indent="  ") for line in lines)]
    for title, rows in (("Only in the run", found.only_run), ("Before recording began", found.before),
                        ("Only predicted", found.only_predicted)):
        if rows:
            parts.append(_list_alone(title, rows))
    return "\n\n".join(parts)


def _name_first(rows: Sequence[HeldAlone]) -> str:
    return f": {rows[0].count} x {format_bytes(rows[0].bytes)} at {clean(rows[0].line)}" + (
        f" and {len(rows) - 1:,} more kinds" if len(rows) > 1 else "") if rows else ""


def _list_alone(title: str, rows: Sequence[HeldAlone]) -> str:
    table = [(cut_middle(row.line, _LINE_WIDTH), f"{row.count} x {format_bytes(row.bytes)}",
              format_bytes(row.total_bytes), row.category) for row in rows[:_ROWS]]
    if len(rows) > _ROWS:
        rest = sum(row.total_bytes for row in rows[_ROWS:])
        table.append((f"({len(rows) - _ROWS:,} more)", "", format_bytes(rest), ""))
    return print_rows((title, "Blocks", "Bytes", "What"), table, left=(0, 3))


def describe_variants(found: PeakComparison, alone: Mapping[str, int]) -> list[str]:
    """The option with which least is held alone, ``alone`` by its flag, where that is much less than without."""
    if not alone:
        return []
    flag, nbytes = min(alone.items(), key=lambda item: item[1])
    if nbytes >= _EXPLAINS * found.alone_bytes:
        return []
    return [f"with {flag}, {format_bytes(nbytes)} are held by one side alone, in place of "
            f"{format_bytes(found.alone_bytes)}"]


def find_limit(error: OutOfMemoryText, owners: OwnersOfMemory) -> int | None:
    """What PyTorch could reserve in the process that failed: its limit, or what others leave of the device."""
    if error.capacity_bytes is None:
        return error.allowed_bytes
    left = error.capacity_bytes - (owners.other_bytes or 0) - (owners.outside_bytes or 0) - (owners.beside_bytes or 0)
    return left if error.allowed_bytes is None else min(left, error.allowed_bytes)


def describe_failure(error: OutOfMemoryText, prediction: Prediction, limit_bytes: int,
                     failure: PredictedFailure | None, advice: Advice | None) -> str:
    """Where the predicted step fails with as much memory as the run had, by how much, and what would do."""
    profile = prediction.profile
    chosen = ", chosen by its memory" if prediction.is_chosen else ""
    lines = [f"against {clean(prediction.name)} on {clean(prediction.device)}{chosen}: PyTorch could reserve "
             f"{format_bytes(limit_bytes)} there, beside what others take; predicted are at most "
             f"{format_bytes(profile.peak_allocated_bytes)} allocated, {format_bytes(profile.peak_reserved_bytes)} "
             "reserved"]
    if failure is None:
        had = None if error.allocated_bytes is None else error.allocated_bytes + (error.requested_bytes or 0)
        peak = profile.peak_allocated_bytes
        more = "" if had is None or peak is None or had <= peak else (
            f"; the run had {format_bytes(had)}, {format_bytes(had - peak)} more than predicted")
        lines.append(f"the predicted step fits into that{more}: a longer or larger batch, a leak, pieces, or a step "
                     "that is another one (--input, --dtype, --optimizer)")
    else:
        where = f"{failure.phase or 'the step'}, at {clean(failure.place)}" + (
            "" if failure.operator is None else f" ({clean(failure.operator)})") + (
            "" if failure.source is None else f", {clean(failure.source)}")
        lines.append(f"it fails in {where}: {format_bytes(failure.requested_bytes)} asked for, "
                     f"{format_bytes(failure.allocated_bytes)} allocated, {format_bytes(failure.short_bytes)} short")
    lines += _find_line(error, prediction)
    if advice is not None:
        lines += [f"least change that would do: {clean(option.name)}: {format_bytes(option.needed_bytes)} needed"
                  + (f" ({clean(option.flags)})" if option.flags else "") for option in advice.cheapest[:1]] or [
            "no change that was tried makes it fit"]
    return "\n".join(fill(line, 120, subsequent_indent="  ") for line in lines)


def _find_line(error: OutOfMemoryText, prediction: Prediction) -> list[str]:
    """Where the traceback's innermost line that the prediction knows is in it."""
    for frame in error.frames:
        source = f"{file_of(frame.file)}:{frame.line}"
        found = [node for node in prediction.profile.nodes
                 if node.source is not None and file_of(node.source) == source]
        if found:
            saved = sum(node.output_bytes or 0 for node in found)
            return [f"the traceback's {clean(source)} is {len(found)} node{'s' * (len(found) > 1)} of the prediction, "
                    f"first {clean(found[0].module_path or found[0].name)}; their results keep {format_bytes(saved)} "
                    "for the backward pass"]
    if not error.frames:
        return []
    return [f"no line of the traceback is in the prediction (innermost: {clean(str(describe_frames(error.frames)))})"]
