"""The page of a profile: its first screen, and what follows."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from analyzer.report.node_table import format_quantity
from analyzer.report.speed import list_bounds
from analyzer.report.summary import PHASE_COLUMNS, describe_run, summarize
from analyzer.results.info import BOUNDS, PhaseInfo, bound_seconds
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

from .answer import find_headline, list_tiles
from .document import Part, headline_part, write_page, write_table
from .part import (
    describe_communication,
    describe_lanes,
    describe_memory,
    describe_modules,
    describe_nodes,
    describe_roofline,
)

# The first screen of a page: the verdict in a sentence, the figures that people ask for, and the phases.

def verdict_part(profile: Profile) -> Part:
    """The sentence, the tiles, what was run and the command that asks again; it needs no script."""
    _, *run = describe_run(profile)
    asked = "" if profile.made_by is None else f"<p>Asked by <code>{escape(str(profile.made_by))}</code></p>"
    return headline_part(
        find_headline(profile), list_tiles(profile), '<details class="run"><summary>What was run</summary>'
        f'<p>{"<br>".join(map(escape, run))}</p>{asked}</details>')


def write_phases(profile: Profile) -> str:
    """HTML of the table of phases, of both steps, and of what bounds the steady one."""
    tables = [("Steady step", profile.phases), ("First step", profile.first_step)]
    written = [_write_phases(title, phases) for title, phases in tables if phases]
    bars = [_write_bound(name, phase) for name, phase in profile.phases.items()]
    if not any(bars):
        return "".join(written)
    keys = "".join(f'<span class="key {bound}">{bound}</span>' for bound in BOUNDS)
    rows = "".join(f"<li>{escape(' · '.join(cell for cell in row if cell != '-'))}</li>"
                   for row in _told_bounds(profile))
    return "".join([*written, f'<h3>What bounds it</h3><div class="keys" aria-hidden="true">{keys}</div>', *bars,
                    f'<ul class="spoken">{rows}</ul>'])


def _told_bounds(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name, *cells in list_bounds(profile):
        yield name, *(f"{bound} {cell}" for bound, cell in zip(BOUNDS, cells) if cell != "-")


def _write_phases(title: str, phases: dict[str, PhaseInfo]) -> str:
    return write_table((title, *(column.header for column in PHASE_COLUMNS)), [
        (name, *(column.format(getattr(phase, column.field)) for column in PHASE_COLUMNS))
        for name, phase in phases.items()])


def _write_bound(name: str, phase: PhaseInfo) -> str:
    """One bar: the shares of a phase's time."""
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


# The page of a profile: the first screen answers, what follows lets one look.

_Describe = Callable[[Profile], Mapping[str, Any] | None]
#: After the verdict, the memory and the phases, in their order: kind of part, title, and its data (None: left out).
_PARTS: tuple[tuple[str, str, _Describe], ...] = (
    ("lanes", "Time", describe_lanes), ("modules", "Modules", describe_modules),
    ("communication", "Communication", describe_communication), ("roofline", "Roofline", describe_roofline),
    ("nodes", "Nodes", describe_nodes))


@register_exporter.shipped("html")
def to_html(profile: Profile, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given. Raises MissingExtraError without plotly."""
    return write_page(describe_run(profile)[0], list(list_parts(profile)), path)


def list_parts(profile: Profile) -> Iterator[Part]:
    """The parts of the page of a profile; those of which it knows nothing are left out."""
    yield verdict_part(profile)
    if (memory := describe_memory(profile)) is not None:
        yield Part("memory", "Memory over the step", memory)
    if phases := write_phases(profile):
        yield Part("phases", "Phases", lead=phases, has_chart=False)
    for kind, title, describe in _PARTS:
        if (data := describe(profile)) is not None:
            yield Part(kind, title, data, has_chart=kind != "nodes")
    yield Part("text", "Summary as text", lead=_write_text(profile), has_chart=False)


def _write_text(profile: Profile) -> str:
    assumed = "".join(f"<li>{escape(line)}</li>" for line in profile.assumptions)
    taken = f"<h3>Taken for granted</h3><ul>{assumed}</ul>" if assumed else ""
    return f"{taken}<details><summary>All totals</summary><pre>{escape(summarize(profile))}</pre></details>"
