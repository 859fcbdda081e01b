"""A comparison as Markdown for a pull request: what changed in a sentence and a table, details folded."""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from analyzer.output import write_output
from analyzer.report.column import print_rows
from analyzer.report.summary import describe_run
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange, QuantityChange
from analyzer.results.view import register_view

from .wording import (
    CONDITION_HEADERS,
    HEADERS,
    MODULE_HEADERS,
    describe_ended,
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
