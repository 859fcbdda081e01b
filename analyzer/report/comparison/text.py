"""A comparison as text whose first screen, 40 lines of 120 characters, answers."""
from __future__ import annotations

import textwrap
from collections.abc import Sequence

from analyzer.report.column import print_rows
from analyzer.report.summary import describe_run
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange, QuantityChange
from analyzer.results.view import register_view

from .wording import (
    HEADERS,
    MODULE_HEADERS,
    describe_condition,
    describe_ended,
    describe_extent,
    list_cells,
    list_changed_totals,
    list_explaining,
    list_notable,
    list_sides,
    list_structure_lines,
    list_throughout,
    list_unchanged,
    list_unknown,
    name_modules,
)

_WIDTH, _HEIGHT = 120, 40
_LEAST_ROWS, _MOST_CATEGORIES = 3, 6
_TITLES = 4            # lines around the rows of a table


@register_view.shipped("comparison_text")
def render_comparison(change: ProfileChange) -> str:
    """Sections with a blank line between them; modules as many as fit on the screen."""
    changed = list_changed_totals(change)
    categories = [row for row in change.categories if row.is_changed]
    modules = list_explaining(change)
    sections = [_describe_sides(change), *([_print_quantities(HEADERS, changed)] if changed else [])]
    last = [text for text in (_list_notes(change), _print_conditions(change)) if text]
    room = _HEIGHT - sum(text.count("\n") + 2 for text in (*sections, *last)) - (_TITLES if modules else 0)
    if categories:
        most = min(_MOST_CATEGORIES, max(_LEAST_ROWS, room - _TITLES - min(len(modules), _LEAST_ROWS)))
        headers = ("At the peak, by category", *HEADERS[1:])
        sections.append(_print_quantities(headers, categories[:most], len(categories) - most))
        room -= sections[-1].count("\n") + 2
    if modules:
        sections.append(_print_modules(modules, max(_LEAST_ROWS, room)))
    return escape_controls("\n\n".join([*sections, *last]))


def _print_conditions(change: ProfileChange) -> str:
    return "\n".join([f"fails if {describe_condition(row)}" for row in change.conditions])


def _describe_sides(change: ProfileChange) -> str:
    lines = [f"{side}: {describe_run(profile)[0]}" for side, profile in list_sides(change)]
    if change.settings:
        lines.append(_fill("not profiled alike: ", change.settings))
    if ended := describe_ended(change):
        lines.append(ended)
    return "\n".join(lines)


def _print_quantities(headers: Sequence[str], rows: Sequence[QuantityChange], more: int = 0) -> str:
    table = print_rows(headers, [(row.header, *list_cells(row)) for row in rows])
    return table + (f"\n... {more} more" if more > 0 else "")


def _print_modules(rows: Sequence[QuantityChange], most: int) -> str:
    """The largest rows, in the order of their share of the step."""
    shown = list_notable(rows)[:most]
    table = print_rows(MODULE_HEADERS, [(name_modules(row), row.type, row.header, *list_cells(row))
                                         for row in shown], left=(0, 1, 2), ends=(0, 1))
    rest = len(rows) - len(shown)
    return table + (f"\n... {rest} smaller, which --format csv lists" if rest else "")


def _list_notes(change: ProfileChange) -> str:
    lines = []
    if said := list_throughout(change):
        lines.append(_fill("changed throughout the model: ", said))
    lines += [_fill(f"{kind}: ", said) for kind, said in list_structure_lines(change.structure)]
    if said := list_unknown(change):
        lines.append(_fill("of modules: ", said))
    if change.before.modules is None or change.after.modules is None:
        lines.append("modules: not compared, for a profile has none")
    if not change.is_changed:
        lines.append(describe_extent(change))
    if said := list_unchanged(change):
        lines.append(_fill("unchanged: ", said))
    return "\n".join(lines)


def _fill(title: str, said: Sequence[str]) -> str:
    return textwrap.fill(title + ", ".join(said), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
