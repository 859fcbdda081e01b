"""Why so much is reserved, what other settings would give, and what grows from step to step, as text."""
from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean, cut_middle
from analyzer.units import format_bytes, format_percent

from .growth import StepGrowth, StepRow
from .replay import Fidelity
from .reserve import Keeper, ReservedPart
from .settings import Settings

_LINE_WIDTH = 60
_STEPS = 6  # rows of steps at the beginning and at the end; those between are one row


def describe_reserved(parts: Sequence[ReservedPart], keepers: Sequence[Keeper]) -> str:
    """What is reserved, by what it is for, and which blocks keep segments."""
    whole = sum(part.bytes for part in parts)
    rows = [(part.name, format_bytes(part.bytes), format_percent(part.bytes / max(whole, 1)),
             "" if part.segments is None else f"{part.segments:,}") for part in parts]
    found = [print_rows(("Reserved at the end", "Bytes", "Share", "Segments"),
                        [*rows, ("reserved", format_bytes(whole), "", "")])]
    if keepers:
        found.append(print_rows(("Line that keeps segments", "Segments", "Of", "Not in use", "In use"), [
            (cut_middle(keeper.line, _LINE_WIDTH), f"{keeper.segments:,}", format_bytes(keeper.bytes),
             format_bytes(keeper.free_bytes), format_bytes(keeper.block_bytes)) for keeper in keepers]))
    return "\n\n".join(found)


def describe_settings(settings: Settings) -> str:
    """The table of settings, and how exact the replay is."""
    if settings.fidelity is None:
        return fill(f"no replay under other settings: {clean(settings.refusal)}", 120)
    rows = []
    for row in settings.rows:
        outcome = row.outcome
        peak, end, taken = ("-", "-", "-") if outcome is None else (
            format_bytes(outcome.peak_reserved_bytes), format_bytes(outcome.end_reserved_bytes),
            f"{len(outcome.new_segments):,}")
        note = row.note if outcome is None or outcome.failed_at is None else (
            f"out of memory at event {outcome.failed_at + 1:,}")
        rows.append((clean(row.setting), peak, end, taken, note))
    table = print_rows(("Setting", "Reserved at most", "At the end", "Segments taken", ""), rows, left=(0, 4))
    return f"{table}\n\n{_describe_fidelity(settings.fidelity)}"


def _describe_fidelity(fidelity: Fidelity) -> str:
    was, found = fidelity.recorded, fidelity.replayed
    text = ("The table begins with what was held, allocated anew. From the recorded segments on, the replay with the "
            f"recorded settings takes {format_bytes(sum(found.new_segments))} in {len(found.new_segments):,} pieces; "
            f"recorded were {format_bytes(sum(was.new_segments))} in {len(was.new_segments):,}")
    if was.new_segments:
        text += f", {format_percent(fidelity.byte_error)} off, {format_percent(fidelity.in_order)} in the same order"
    return fill(text + ".", 120)


def describe_growth(growth: StepGrowth | None) -> str:
    """The steps and the lines that grow."""
    if growth is None:
        return "no two steps can be told apart: neither annotations nor stacks of an optimizer, and nothing comes back"
    steps = growth.steps
    rows = [_row(step) for step in (steps if len(steps) <= 2 * _STEPS else steps[:_STEPS])]
    if len(steps) > 2 * _STEPS:
        rows += [("...", "", "", ""), *[_row(step) for step in steps[-_STEPS:]]]
    found = [f"{len(steps):,} steps, told apart by {growth.found_by}",
             print_rows(("Step", "Held at its end", "More than before", "Peak"), rows)]
    if growth.lines:
        found.append(print_rows(("Line that holds more than in the first step", "Bytes", "In the last step", "What"), [
            (cut_middle(row.line, _LINE_WIDTH), format_bytes(row.growth_bytes), format_bytes(row.last_growth_bytes),
             {"leak": "grows to the end: a leak", "ended": "growth that ended"}.get(row.kind, row.kind))
            for row in growth.lines], left=(0, 3)))
    else:
        found.append("nothing is held longer than a step")
    return "\n\n".join(found)


def _row(step: StepRow) -> tuple[str, str, str, str]:
    growth = "-" if step.growth_bytes is None else ("-" if step.growth_bytes < 0 else "") + format_bytes(
        abs(step.growth_bytes))
    return str(step.number), format_bytes(step.held_bytes), growth, format_bytes(step.peak_bytes)
