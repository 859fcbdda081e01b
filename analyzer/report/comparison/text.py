"""A comparison as text: for a terminal, as one table, and as Markdown for a pull request."""
from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from analyzer.output import write_output
from analyzer.report.node_table import Column, check_layout, format_quantity, print_rows
from analyzer.report.quantity import print_data
from analyzer.report.summary import describe_run
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange, QuantityChange
from analyzer.results.view import register_view

from .wording import (
    CONDITION_HEADERS,
    HEADERS,
    MODULE_HEADERS,
    describe_change,
    describe_condition,
    describe_ended,
    describe_extent,
    describe_first,
    describe_result,
    list_cells,
    list_changed_totals,
    list_condition_cells,
    list_explaining,
    list_notable,
    list_sides,
    list_structure_lines,
    list_throughout,
    list_unchanged,
    list_unknown,
    name_modules,
)

# A comparison as one table.

# a row's unit is its own: figures are written out before they become cells
_COLUMNS = [Column("quantity", "Quantity", "text"), Column("category", "Category", "text"),
            Column("module", "Module", "text"), Column("type", "Type", "text"), Column("modules", "Modules", "text"),
            Column("unit", "Unit", "text"), Column("before", "Before", "number"), Column("after", "After", "number"),
            Column("difference", "Change", "number"), Column("relative", "Relative", "number"),
            Column("share", "Share of the step", "number")]


@register_view.shipped("comparison_rows")
def list_changes(change: ProfileChange, fmt: str = "text") -> str:
    """A row for each quantity of the step, category and module that differs."""
    check_layout(None, 0, fmt, "ProfileChange.table()")
    rows: list[list[object]] = []
    for row in (*change.totals, *change.categories, *change.modules):
        if row.is_changed:
            figures: list[object] = (
                [row.before, row.after, row.difference, row.relative, row.share] if fmt == "csv" else
                [format_quantity(row.before, row.unit), format_quantity(row.after, row.unit), describe_change(row),
                 None if row.relative is None else f"{row.relative:+.2%}",
                 None if row.share is None else f"{row.share:.2%}"])
            rows.append([row.quantity, row.category or "", row.module or "", row.type, row.modules or "", row.unit,
                         *figures])
    return print_data(_COLUMNS, rows, fmt)


# A comparison as text whose first screen, 40 lines of 120 characters, answers.

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


# A comparison as Markdown for a pull request: what changed in a sentence and a table, details folded.

_MOST_MODULES = 20


@register_view.shipped("comparison_markdown")
def to_markdown(change: ProfileChange, path: str | Path | None = None) -> str:
    """The summary as text, also written to ``path`` if one is given."""
    text = "\n\n".join(_list_blocks(change)) + "\n"
    if path is not None:
        write_output(path, text)
    return text


def _list_blocks(change: ProfileChange) -> Iterator[str]:
    yield f"### Cost of a step of {code(change.after.name)}: {describe_result(change)}"
    if said := describe_first(change):
        yield f"**{said}**"
    if change.settings:
        yield f"Not profiled alike: {', '.join(map(code, change.settings))}."
    if ended := describe_ended(change):
        yield f"{ended.capitalize()}."
    if change.conditions:
        cells = [[code(row[0]), *row[1:4], row[4] if row[4] == "ok" else f"**{row[4]}**"]
                 for row in map(list_condition_cells, change.conditions)]
        yield print_rows(CONDITION_HEADERS, cells, left=(0, 4), fmt="markdown")
    if changed := list_changed_totals(change):
        cells = [[row.header, *list_cells(row)] for row in changed]
        yield print_rows(("Quantity", *HEADERS[1:]), cells, fmt="markdown")
    if categories := [row for row in change.categories if row.is_changed]:
        yield from _fold("Memory at the peak by category", print_rows(
            ("Category", *HEADERS[1:]), [(code(row.header), *list_cells(row)) for row in categories], fmt="markdown"))
    yield from _list_modules(change)
    if said := ", ".join(map(_name, list_unchanged(change))):
        yield f"Unchanged: {said}."
    runs = [f"- {side}: {', '.join(map(code, describe_run(profile)))}" for side, profile in list_sides(change)]
    yield from _fold("What was profiled", "\n".join(runs))


def _list_modules(change: ProfileChange) -> Iterator[str]:
    rows = list_explaining(change)
    shown = list_notable(rows)[:_MOST_MODULES]
    blocks = [f"- {kind}: {', '.join(map(code, said))}" for kind, said in list_structure_lines(change.structure, 10)]
    blocks += [f"- changed throughout the model: {', '.join(map(_name, said))}"] if (
        said := list_throughout(change)) else []
    blocks += [f"- of modules: {', '.join(map(_name, said))}"] if (said := list_unknown(change)) else []
    if shown:
        table = print_rows(MODULE_HEADERS, [
            (code(name_modules(row)), code(row.type), _name_quantity(row), *list_cells(row)) for row in shown],
            left=(0, 1, 2), fmt="markdown")
        rest = len(rows) - len(shown)
        blocks = [table, *([f"{rest} smaller changes are left out."] if rest else []), "\n".join(blocks)]
    else:
        blocks = ["\n".join(blocks)]
    if body := "\n\n".join(block for block in blocks if block):
        yield from _fold(f"Modules: {len(rows)} changes" if rows else "Modules", body)


def _name_quantity(row: QuantityChange) -> str:
    return f"Peak: {code(row.category)}" if row.category else row.header


def _name(text: str) -> str:
    """The name of a quantity, which has that of a category in it, as it is read in any place."""
    return text if re.fullmatch(r"[A-Za-z0-9 :.%+-]+", text) else code(text)


def _fold(title: str, body: str) -> Iterable[str]:
    # the blank lines make what is inside Markdown again
    return [f"<details>\n<summary>{title}</summary>", body, "</details>"]


def code(text: str) -> str:
    """``text`` as a code span, in which nothing has a meaning: no link, mention, emphasis or HTML.

    >>> print(code("layers.*"), code("a`b"), code("<b>@all"))
    `layers.*` ``a`b`` `<b>@all`
    """
    text = escape_controls(text).replace("\n", r"\n").replace("\t", r"\t")
    fence = "`" * (1 + max([len(run) for run in re.findall("`+", text)], default=0))
    pad = " " if text[:1] in ("`", " ", "") or text[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
