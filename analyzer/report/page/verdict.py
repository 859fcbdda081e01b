"""The first screen of a page: the verdict in a sentence, the figures that people ask for, and the phases."""
from __future__ import annotations

from collections.abc import Iterator
from html import escape

from analyzer.report.bound import list_bounds
from analyzer.report.column import format_quantity
from analyzer.report.summary import PHASE_COLUMNS, describe_run
from analyzer.results.info import BOUNDS, PhaseInfo, bound_seconds
from analyzer.results.profile import Profile

from .answer import find_headline, list_tiles
from .document import Part
from .headline import headline_part
from .plain_table import write_table


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
