"""A comparison as one HTML page: what changed, memory over both steps, and the modules that explain it."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from analyzer.output import write_output
from analyzer.report.column import escape_controls
from analyzer.report.page.document import Part, build_page, columns_of
from analyzer.report.summary import describe_run
from analyzer.results.comparison import ProfileChange, QuantityChange
from analyzer.results.view import register_view

from .memory import describe_both
from .wording import (
    CONDITION_HEADERS,
    HEADERS,
    describe_first,
    describe_result,
    is_explaining,
    list_cells,
    list_changed_totals,
    list_condition_cells,
    list_structure_lines,
    list_unchanged,
)

_FIELDS = ("module", "type", "modules", "before", "after", "difference")
_STATES = {True: "fails", False: "fits"}


@register_view.shipped("comparison_html")
def to_html(change: ProfileChange, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given. Raises MissingExtraError without plotly."""
    page = build_page(f"{change.after.name}: what changed", list(_list_parts(change)))
    if path is not None:
        write_output(path, page)
    return page


@register_view.shipped("comparison_notebook")
def to_fragment(change: ProfileChange) -> str:
    """What a notebook shows: the sentence and the tables."""
    return f"<div>{_write_answer(change)}{_write_tables(change)}</div>"


def _list_parts(change: ProfileChange) -> Iterator[Part]:
    yield Part("verdict", "", lead=_write_answer(change), has_chart=False)
    yield Part("text", "Figures", lead=_write_tables(change), has_chart=False)
    if (memory := describe_both(change.before, change.after)) is not None:
        yield Part("memory_change", "Memory over both steps", memory)
    if change.modules or change.structure:
        quantities = list(_list_quantities(change.modules))
        yield Part("module_change", "Modules", {"quantities": quantities}, lead=_write_structure(change),
                   has_chart=bool(quantities))
    yield Part("text", "As text", lead=f"<pre>{_text(change.render())}</pre>", has_chart=False)


def _list_quantities(rows: Iterable[QuantityChange]) -> Iterator[dict[str, Any]]:
    """The rows of each quantity by column: those first whose change some modules explain, and that changed most."""
    found: dict[str, list[QuantityChange]] = {}
    for row in rows:
        found.setdefault(row.quantity, []).append(row)
    for group in sorted(found.values(), key=lambda group: not is_explaining(group[0])):
        yield {"title": group[0].header, "unit": group[0].unit, **columns_of(group, _FIELDS),
               "percent": [None if row.relative is None else round(100 * row.relative, 2) for row in group]}


def _write_answer(change: ProfileChange) -> str:
    """What became of the conditions and which main quantities changed, in words."""
    result, first = describe_result(change), describe_first(change)
    state = _STATES[bool(change.failed)] if change.conditions else "unknown"
    said = [*([first] if first else []), *[f"Not profiled alike: {text}" for text in change.settings]]
    for side, profile in (("before", change.before), ("after", change.after)):
        if profile.out_of_memory is not None:
            said.append(f"Memory ran out {side}: of that step the model's own figures alone are known")
    runs = [f"{side}: {line}" for side, profile in (("before", change.before), ("after", change.after))
            for line in describe_run(profile)]
    return "".join([f'<p class="headline {state}">{_text(result[:1].upper() + result[1:])}</p>',
                    *(f'<p class="said">{_text(line)}</p>' for line in said),
                    f'<details class="run"><summary>What was profiled</summary><p>{"<br>".join(map(_text, runs))}</p>'
                    "</details>"])


def _write_tables(change: ProfileChange) -> str:
    tables = []
    if change.conditions:
        tables.append(_write_table(CONDITION_HEADERS, [list_condition_cells(row) for row in change.conditions]))
    if changed := list_changed_totals(change):
        tables.append(_write_table(("Step", *HEADERS[1:]), [(row.header, *list_cells(row)) for row in changed]))
    if categories := [row for row in change.categories if row.is_changed]:
        tables.append(_write_table(("At the peak, by category", *HEADERS[1:]),
                                   [(row.header, *list_cells(row)) for row in categories]))
    if same := list_unchanged(change):
        tables.append(f'<p class="note">Unchanged: {_text(", ".join(same))}.</p>')
    return "".join(tables)


def _write_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(text)}</th>' for text in headers)
    body = "".join(f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(
        f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>" for row in rows)
    return (f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            "</div><br>")


def _write_structure(change: ProfileChange) -> str:
    lines = [f"<li>{_text(kind)}: {_text(', '.join(said))}</li>"
             for kind, said in list_structure_lines(change.structure, 20)]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _text(text: str) -> str:
    return escape(escape_controls(text))
