"""A comparison as one HTML page: what changed, memory over both steps, and the modules that explain it."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from analyzer.report.page.document import Headline, Panel, columns_of, headline_part, write_page, write_table
from analyzer.report.page.notebook import fold, write_answer, write_fragment, write_rows
from analyzer.report.page.part import thin_out
from analyzer.report.summary import describe_run
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange, QuantityChange
from analyzer.results.info import TimelinePoint
from analyzer.results.profile import ProfileData

from . import text as words

_MOST_POINTS = 3000  # of each step: twice what a window shows


def describe_both(before: ProfileData, after: ProfileData) -> dict[str, Any] | None:
    """The moments of both steps from 0 to 1, phase by phase where these are alike; None where one has no timeline."""
    runs = [_list_phases(profile) for profile in (before, after)]
    if not all(runs):
        return None
    names = [[name for name, _ in found] for found in runs]
    are_aligned = names[0] == names[1]
    weights = [[len(points) / sum(len(points) for _, points in found) for _, points in found] for found in runs]
    if are_aligned:
        mean = [(a + b) / 2 for a, b in zip(*weights, strict=True)]
        weights = [mean, mean]
    sides = [_describe(title, profile, found, widths) for title, profile, found, widths in zip(
        ("before", "after"), (before, after), runs, weights, strict=True)]
    starts = [sum(weights[1][:i]) for i in range(len(weights[1]))]
    return {"sides": sides, "phases": [{"name": name, "start": start} for name, start in zip(
        names[1], starts, strict=True)] if are_aligned else []}


def _list_phases(profile: ProfileData) -> list[tuple[str, list[TimelinePoint]]]:
    points = thin_out(profile.timeline, _MOST_POINTS) if profile.timeline else []
    return [(phase or "", list(group)) for phase, group in groupby(points, key=lambda point: point.phase)]


def _describe(title: str, profile: ProfileData, phases: Sequence[tuple[str, list[TimelinePoint]]],
              widths: Sequence[float]) -> dict[str, Any]:
    modules = {node.name: node.module_path for node in profile.nodes}
    points = [point for _, group in phases for point in group]
    return {"title": title,
            "x": [sum(widths[:phase]) + widths[phase] * i / len(group)  # at equal distances in each phase
                  for phase, (_, group) in enumerate(phases) for i in range(len(group))],
            "allocated": [point.allocated_bytes for point in points],
            "label": [str(point.label) for point in points],
            "module": [modules.get(str(point.label), "") for point in points],
            "phase": [point.phase or "" for point in points],
            "seconds": [point.seconds for point in points]}


_FIELDS = ("module", "type", "modules", "before", "after", "difference")
_Table = tuple[Sequence[str], list[Sequence[str]]]  # headers and rows


def to_html(change: ProfileChange, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given. Raises MissingExtraError without plotly."""
    return write_page(f"{change.after.name}: what changed", list(_list_parts(change)), path)


def to_fragment(change: ProfileChange) -> str:
    """What a notebook shows: the sentence and the tables, folded what was profiled."""
    return write_fragment(
        f"{change.before.name} -> {change.after.name}", write_answer(_find_headline(change)),
        *(write_rows(*table) for table in _list_tables(change)), _write_unchanged(change),
        fold("What was profiled", _write_runs(change)))


def _list_parts(change: ProfileChange) -> Iterator[Panel]:
    runs = f'<details class="run"><summary>What was profiled</summary><p>{_write_runs(change)}</p></details>'
    yield headline_part(_find_headline(change), more=runs)
    tables = "".join([f"{write_table(*table)}<br>" for table in _list_tables(change)])
    yield Panel("text", "Figures", lead=tables + _write_unchanged(change), has_chart=False)
    if (memory := describe_both(change.before, change.after)) is not None:
        yield Panel("memory_change", "Memory over both steps", memory)
    if change.modules or change.structure:
        quantities = list(_list_quantities(change.modules))
        built = "".join([f"<li>{_text(kind)}: {_text(', '.join(said))}</li>"
                         for kind, said in words.list_structure_lines(change.structure, 20)])
        yield Panel("module_change", "Modules", {"quantities": quantities}, lead=f"<ul>{built}</ul>" if built else "",
                    has_chart=bool(quantities))
    yield Panel("text", "As text", lead=f"<pre>{_text(change.render())}</pre>", has_chart=False)


def _list_quantities(rows: Iterable[QuantityChange]) -> Iterator[dict[str, Any]]:
    """The rows of each quantity by column: those first whose change some modules explain, and that changed most."""
    found: dict[str, list[QuantityChange]] = {}
    for row in rows:
        found.setdefault(row.quantity, []).append(row)
    for group in sorted(found.values(), key=lambda group: not words.is_explaining(group[0])):
        yield {"title": group[0].header, "unit": group[0].unit, **columns_of(group, _FIELDS),
               "percent": [None if row.relative is None else round(100 * row.relative, 2) for row in group]}


def _find_headline(change: ProfileChange) -> Headline:
    said = [words.describe_first(change), *[f"Not profiled alike: {text}" for text in change.settings],
            words.describe_ended(change)]
    return Headline.of(not change.failed if change.conditions else None, words.describe_result(change),
                       [escape_controls(line) for line in said if line])


def _write_runs(change: ProfileChange) -> str:
    return "<br>".join([_text(f"{side}: {line}") for side, profile in words.list_sides(change)
                        for line in describe_run(profile)])


def _list_tables(change: ProfileChange) -> Iterator[_Table]:
    if change.conditions:
        yield words.CONDITION_HEADERS, [words.list_condition_cells(row) for row in change.conditions]
    for title, rows in zip(("Step", words.BY_CATEGORY), words.list_changed(change)):
        if rows:
            yield (title, *words.HEADERS[1:]), [(row.header, *words.list_cells(row)) for row in rows]


def _write_unchanged(change: ProfileChange) -> str:
    same = words.list_unchanged(change)
    return f'<p class="note">Unchanged: {_text(", ".join(same))}.</p>' if same else ""


def _text(text: str) -> str:
    return escape(escape_controls(text))
