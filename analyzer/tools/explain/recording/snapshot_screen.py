"""A memory snapshot as text: the first screen, short and in plain words."""
from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean, cut_middle
from analyzer.units import format_bytes, format_percent, format_seconds

from .snapshot import Snapshot
from .snapshot_report import BlockRow, DeviceReport, HeldRow, OutOfMemory

_LINES = 7  # lines of code that are told, so that all is on one screen; the rest is one row
_LINE_WIDTH = 72  # columns: a row then fits into 120


def describe_snapshot(snapshot: Snapshot, reports: Sequence[DeviceReport]) -> str:
    """The device that holds most, and a line for each other one."""
    told = max(reports, key=lambda report: report.peak_bytes)
    others = [f"device {report.device}: {format_bytes(report.peak_bytes)} held at most, "
              f"{format_bytes(report.end_reserved_bytes)} reserved at the end"
              for report in reports if report is not told]
    settings = (snapshot.settings or {}).get("PYTORCH_CUDA_ALLOC_CONF")
    said = "not recorded" if settings is None else clean(settings) or "PyTorch's defaults"
    head = (f"{clean(snapshot.name)}: memory snapshot of device {told.device}, {told.events:,} events"
            + ("" if told.seconds is None else f" in {format_seconds(told.seconds)}") + f"; allocator settings: {said}")
    return "\n\n".join([_wrap(head), _describe_sizes(told), *[_describe_failure(failure) for failure in
                                                              told.out_of_memory[-1:]],
                        _list_held("Held at the peak", told.by_category, told.peak_bytes),
                        _list_held("By line of code", told.by_line, told.peak_bytes),
                        _list_blocks("Largest blocks at the peak", told.largest), *["\n".join(others)] * bool(others)])


def _wrap(text: str) -> str:
    return fill(text, 120, subsequent_indent="  ", break_long_words=False)


def _describe_sizes(report: DeviceReport) -> str:
    when = "before the first event" if report.peak_event is None else f"at event {report.peak_event + 1:,}" + (
        "" if report.peak_seconds is None else f", {format_seconds(report.peak_seconds)} after the first")
    rounding = report.end_allocated_bytes - report.end_bytes
    lines = [
        f"peak: {format_bytes(report.peak_bytes)} held {when}; {format_bytes(report.peak_reserved_bytes)} reserved "
        "then",
        f"before recording began: {format_bytes(report.start_bytes)} held, "
        f"{format_bytes(report.start_reserved_bytes)} reserved",
        f"at the end: {format_bytes(report.end_bytes)} held, {format_bytes(rounding)} more by rounding, "
        f"{format_bytes(report.end_reserved_bytes)} reserved; at most {format_bytes(report.most_reserved_bytes)} "
        "reserved"]
    if report.unmatched:
        lines.append(f"{report.unmatched:,} events do not agree with the others: the history was cut, or some kinds "
                     "of events were not recorded; what is said of the time before the end is less certain")
    return "\n".join(_wrap(line) for line in lines)


def _describe_failure(failure: OutOfMemory) -> str:
    text = _wrap(f"out of memory at event {failure.event + 1:,}: {format_bytes(failure.requested_bytes)} asked for at "
                 f"{clean(failure.line)}; {format_bytes(failure.held_bytes)} held, "
                 f"{format_bytes(failure.reserved_bytes)} reserved, {format_bytes(failure.free_bytes)} free on the "
                 "device")
    return f"{text}\n\n{_list_blocks('Freed last before', failure.last_freed)}" if failure.last_freed else text


def _list_held(title: str, rows: Sequence[HeldRow], whole: int) -> str:
    told, rest = rows[:_LINES], rows[_LINES:]
    table = [(cut_middle(row.name, _LINE_WIDTH), format_bytes(row.bytes), format_percent(row.bytes / max(whole, 1)),
              f"{row.blocks:,}") for row in told]
    if rest:
        nbytes = sum(row.bytes for row in rest)
        table.append((f"({len(rest):,} more)", format_bytes(nbytes), format_percent(nbytes / max(whole, 1)),
                      f"{sum(row.blocks for row in rest):,}"))
    return print_rows((title, "Bytes", "Share", "Blocks"), table)


def _list_blocks(title: str, rows: Sequence[BlockRow]) -> str:
    return print_rows((title, "Bytes", "What", "Events"), [
        (cut_middle(row.line, _LINE_WIDTH - 22),
         f"{row.count} x {format_bytes(row.bytes)}" if row.count > 1 else format_bytes(row.bytes), row.category,
         f"{'start' if row.born is None else f'{row.born + 1:,}'} to "
         f"{'end' if row.died is None else f'{row.died + 1:,}'}") for row in rows], left=(0, 2))
