"""The page of a profile: its first screen, and what follows."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from analyzer.report.device_table import COPY_HEADERS, DEVICE_HEADERS, list_copy_rows, list_device_rows
from analyzer.report.fits import format_peak, format_range
from analyzer.report.holder_group import sum_exposed
from analyzer.report.speed import describe_seconds, find_remedy, format_step, list_bounds, read_rate
from analyzer.report.summary import PHASE_COLUMNS, describe_out_of_memory, describe_run, summarize
from analyzer.report.text_table import format_quantity
from analyzer.report.verdict import judge
from analyzer.results.info import BOUNDS, PhaseInfo, bound_seconds
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_exporter

from . import part
from .document import Headline, Panel, Tile, headline_part, write_page, write_table


def find_headline(profile: ProfileData) -> Headline:
    """Whether the step fits, where its peak is, and what bounds it."""
    verdict = judge(profile)
    lines = str(verdict).splitlines() if verdict is not None else ["no device was given: whether it fits is not known"]
    if profile.out_of_memory is not None:
        lines.insert(1, describe_out_of_memory(profile.out_of_memory, profile.fullest_device))
    if (remedy := find_remedy(profile)) is not None:
        lines.append(f"bound by {remedy}")
    return Headline.of(None if verdict is None else verdict.fits, lines[0], lines[1:])


def _name_fullest(profile: ProfileData) -> str:
    return "" if profile.fullest_device is None else f" on {profile.fullest_device}"


def list_tiles(p: ProfileData) -> Iterator[Tile]:
    """Memory, time, how well the device is used, size and work, as far as they are known."""
    size = format_quantity
    between = format_range(p.peak_allocated_bytes, p.peak_allocated_bytes_range)
    yield Tile("Peak allocated", size(p.peak_allocated_bytes, "bytes"),
               f"{format_peak(p.peak_reserved_bytes, p.peak_reserved_bytes_range)} reserved{_name_fullest(p)}",
               "At most, over the first and a later step" + (f": {between}." if between else "."))
    if p.step_seconds is not None:
        low_high = format_step(p).partition(" (")[2].rstrip(")")
        note = f"{p.how_timed}, {low_high}" if low_high else p.how_timed
        yield Tile("Step time", size(p.step_seconds, "seconds"), note, describe_seconds(p))
    if (mfu := read_rate(p, "mfu")) is not None:
        hfu = read_rate(p, "hfu")
        yield Tile("MFU", size(mfu, "share"), "" if hfu in (None, mfu) else f"HFU {size(hfu, 'share')}",
                   "Model FLOPs utilization: forward and backward over the device's peak.")
    if p.tokens_per_second is not None:
        yield Tile("Tokens a second", size(p.tokens_per_second, "count"),
                   "" if p.data_parallel_size in (None, 1) else f"of {p.data_parallel_size} copies")
    elif p.samples_per_second is not None:
        yield Tile("Samples a second", size(p.samples_per_second, "count"))
    yield Tile("Parameters", size(p.params, "count"), size(p.param_bytes, "bytes"))
    yield Tile("FLOPs", size(p.hardware_flops, "count"),
               "" if p.mode == "infer" else f"{size(p.fwd_flops, 'count')} forward")
    if p.comm:
        yield Tile("Exposed communication", size(sum_exposed(p), "seconds"), "", "In which nothing is computed.")


def write_phases(profile: ProfileData) -> str:
    """HTML of the table of phases, of both steps, and of what bounds the steady one."""
    tables = [("Steady step", profile.phases), ("First step", profile.first_step)]
    written = [write_table((title, *(column.header for column in PHASE_COLUMNS)), [
        (name, *(column.format(getattr(phase, column.field)) for column in PHASE_COLUMNS))
        for name, phase in phases.items()]) for title, phases in tables if phases]
    bars = [_write_bound(name, phase) for name, phase in profile.phases.items()]
    if not any(bars):
        return "".join(written)
    keys = "".join(f'<span class="key {bound}">{bound}</span>' for bound in BOUNDS)
    told = [[name, *(f"{bound} {cell}" for bound, cell in zip(BOUNDS, cells) if cell != "-")]
            for name, *cells in list_bounds(profile)]
    rows = "".join(f"<li>{escape(' · '.join(row))}</li>" for row in told)
    return "".join([*written, f'<h3>What bounds it</h3><div class="keys" aria-hidden="true">{keys}</div>', *bars,
                    f'<ul class="spoken">{rows}</ul>'])


def _write_bound(name: str, phase: PhaseInfo) -> str:
    parts = bound_seconds(phase)
    total = sum(parts.values())
    if phase.launch_seconds is None or not total:
        return ""
    cells = "".join(
        f'<span class="{bound}" style="width:{100 * part / total:.2f}%" '
        f'title="{bound} {escape(format_quantity(part, "seconds"))}"></span>'
        for bound, part in parts.items() if part)
    return (f'<div class="bound"><span>{escape(name)}</span><div class="bar" aria-hidden="true">{cells}</div>'
            f'<span>{escape(format_quantity(phase.seconds, "seconds"))}</span></div>')


#: After the verdict, the memory and the phases, in their order: kind of part, title, and its data (None: left out).
_PARTS: tuple[tuple[str, str, Callable[[ProfileData], Mapping[str, Any] | None]], ...] = (
    ("lanes", "Time", part.describe_lanes), ("modules", "Modules", part.describe_modules),
    ("communication", "Communication", part.describe_communication), ("roofline", "Roofline", part.describe_roofline),
    ("nodes", "Nodes", part.describe_nodes))


@register_exporter.shipped("html")
def to_html(profile: ProfileData, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given. Raises MissingExtraError without plotly."""
    return write_page(describe_run(profile)[0], list(list_parts(profile)), path)


def list_parts(profile: ProfileData) -> Iterator[Panel]:
    """The parts of the page of a profile; those of which it knows nothing are left out."""
    _, *run = describe_run(profile)
    asked = "" if profile.made_by is None else f"<p>Asked by <code>{escape(str(profile.made_by))}</code></p>"
    yield headline_part(  # it needs no script
        find_headline(profile), list_tiles(profile), '<details class="run"><summary>What was run</summary>'
        f'<p>{"<br>".join(map(escape, run))}</p>{asked}</details>')
    if (memory := part.describe_memory(profile)) is not None:
        yield Panel("memory", f"Memory over the step{_name_fullest(profile)}", memory)
    if profile.devices:
        tables = [write_table(DEVICE_HEADERS, list(list_device_rows(profile))),
                  *([write_table(COPY_HEADERS, list(list_copy_rows(profile)))] if profile.copies else [])]
        yield Panel("devices", "Devices", lead="".join(tables), has_chart=False)
    if phases := write_phases(profile):
        yield Panel("phases", "Phases", lead=phases, has_chart=False)
    for kind, title, describe in _PARTS:
        if (data := describe(profile)) is not None:
            yield Panel(kind, title, data, has_chart=kind != "nodes")
    assumed = "".join(f"<li>{escape(line)}</li>" for line in profile.assumptions)
    taken = f"<h3>Assumptions</h3><ul>{assumed}</ul>" if assumed else ""
    yield Panel("text", "Summary as text", has_chart=False, lead=(
        f"{taken}<details><summary>All totals</summary><pre>{escape(summarize(profile))}</pre></details>"))
