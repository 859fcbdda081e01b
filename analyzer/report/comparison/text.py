"""A comparison in words: for a terminal, as one table, and as Markdown for a pull request."""
from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from analyzer.output import write_output
from analyzer.report.module_tree import OWN
from analyzer.report.quantity import ROOT, print_data
from analyzer.report.summary import describe_run
from analyzer.report.text_table import Column, check_layout, format_quantity, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ConditionResult, ModuleChange, ProfileChange, QuantityChange
from analyzer.results.profile import ProfileData

HEADERS = ("", "Before", "After", "Change")
MODULE_HEADERS = ("Module", "Type", "Quantity", *HEADERS[1:])
CONDITION_HEADERS = ("Fails if", "Before", "After", "Limit", "Verdict")
BY_CATEGORY = "At the peak, by category"
#: Quantities that the sentence at the top names, where they changed.
_FIRST = ("peak_allocated_bytes", "step_seconds", "hardware_flops", "params")
_LEAST = 5e-4  # of what was before, that the sentence speaks of
_LEAST_SHARE = 0.001


def list_cells(row: QuantityChange) -> tuple[str, str, str]:
    """Before, after, and the difference with its sign and share, or on which side the quantity is not known."""
    if row.difference is None:
        said = "unknown" if row.is_unknown else f"unknown {'before' if row.before is None else 'after'}"
    else:
        said = f"{'+' if row.difference > 0 else ''}{format_quantity(row.difference, row.unit)}{_tell_share(row)}"
    return format_quantity(row.before, row.unit), format_quantity(row.after, row.unit), said


def _tell_share(row: QuantityChange) -> str:
    return "" if row.relative is None else f" ({describe_share(row.relative)})"


def describe_share(relative: float) -> str:
    """A relative difference in percent, as a factor where it is large.

    >>> describe_share(-0.4063), describe_share(0.0004), describe_share(-1e-7), describe_share(21.5)
    ('-40.6%', '+0.04%', '< 0.01%', 'x22.5')
    """
    if relative >= 9:
        return f"x{1 + relative:.3g}"
    if abs(relative) < 5e-5:
        return "< 0.01%"
    return f"{relative:+.2%}" if abs(relative) < 0.001 else f"{relative:+.1%}"


def _name_modules(row: QuantityChange | ModuleChange) -> str:
    return f"{row.module} ({row.modules})" if row.modules > 1 else f"{row.module}"


def describe_result(change: ProfileChange) -> str:
    """What became of the conditions, or whether anything changed."""
    if change.failed:
        return f"{len(change.failed)} of {len(change.conditions)} conditions failed"
    return f"{_describe_extent(change)}, all conditions hold" if change.conditions else _describe_extent(change)


def _describe_extent(change: ProfileChange) -> str:
    if change.is_changed:
        return "changed"
    return "nothing is known of either step" if all(row.is_unknown for row in change.totals) else "nothing changed"


def list_sides(change: ProfileChange) -> tuple[tuple[str, ProfileData], ...]:
    """Both profiles, each under the word for its side."""
    return ("before", change.before), ("after", change.after)


def describe_ended(change: ProfileChange) -> str:
    """Which steps ran out of memory, and what is known of such a one; nothing where none did."""
    ended = [side for side, profile in list_sides(change) if profile.out_of_memory is not None]
    said = f"memory ran out {' and '.join(ended)}: of that step the model's own figures alone are known"
    return said if ended else ""


def describe_first(change: ProfileChange) -> str:
    """The main quantities that changed by more than next to nothing, each with what it was and what it is."""
    rows = {row.quantity: row for row in change.totals if row.difference and (
        row.relative is None or abs(row.relative) >= _LEAST)}
    return ", ".join(f"{row.header} {' → '.join(list_cells(row)[:2])}{_tell_share(row)}"
                     for row in (rows[name] for name in _FIRST if name in rows))


def is_explaining(row: QuantityChange) -> bool:
    """Whether a row is not of the whole model, nor of memory that no submodule holds."""
    return row.module != ROOT and not (row.category and row.module == OWN)


def list_changed(change: ProfileChange) -> tuple[list[QuantityChange], list[QuantityChange]]:
    """What changed of the step (not the size of parameters where their number did), and of memory by category."""
    rows = [row for row in change.totals if row.is_changed]
    if any(row.quantity == "params" and row.difference is not None for row in rows):
        rows = [row for row in rows if row.quantity != "param_bytes"]
    return rows, [row for row in change.categories if row.is_changed]


def list_unchanged(change: ProfileChange) -> list[str]:
    """Names of the quantities that did not change; those that are nothing are left out."""
    totals, categories = ([row.header for row in rows if not row.is_changed and row.after]
                          for rows in (change.totals, change.categories))
    return [*totals, *([f"at the peak {' '.join(categories[:1])}", *categories[1:]] if categories else [])]


def list_structure_lines(rows: Sequence[ModuleChange], most: int = 4) -> list[tuple[str, list[str]]]:
    """By kind of change, the modules in words, and how many kinds of place more there are."""
    found: dict[str, list[str]] = {}
    for row in rows:
        name = _name_modules(row)
        said = {"renamed": f"{row.before} -> {name}", "replaced": f"{name}: {row.before} -> {row.type}"}
        found.setdefault(row.kind, []).append(said.get(row.kind, f"{name}: {row.type}"))
    return [(kind, [*said[:most], *([f"{len(said) - most} more"] if len(said) > most else [])])
            for kind, said in found.items()]


def list_notes(change: ProfileChange, most: int) -> Iterator[tuple[str, list[str]]]:
    """Under titles: what changed as a whole, what was built otherwise, and what only one profile's modules know."""
    whole = [row for row in change.modules if row.module == ROOT]
    throughout = [f"{row.header}{'' if row.relative is None else ' ' + describe_share(row.relative)}"
                  for row in whole if row.difference is not None]
    unknown = [f"{row.header} {list_cells(row)[2]}" for row in whole if row.difference is None]
    yield from ((title, said) for title, said in (
        ("changed throughout the model", throughout), *list_structure_lines(change.structure, most),
        ("of modules", unknown)) if said)


def list_condition_cells(row: ConditionResult) -> tuple[str, ...]:
    """The condition, its figures and its verdict."""
    return (row.text, *(format_quantity(value, row.unit) for value in (row.before, row.after, row.bound)), row.verdict)


def describe_condition(row: ConditionResult) -> str:
    """A condition, what became of it, and its figures.

    >>> describe_condition(ConditionResult(text="params > +2%", quantity="params", unit="count", before=100, after=120,
    ...                                  bound=102.0, verdict="failed"))
    'params > +2%: failed: 100 before, 120 after (+20.0%), limit 102'
    """
    change = QuantityChange(quantity=row.quantity, unit=row.unit, before=row.before, after=row.after)
    before, after, bound = list_condition_cells(row)[1:4]
    limit = "" if row.bound is None else f", limit {bound}"
    return (f"{row.text}: {row.verdict}: {before} before, {after} after{_tell_share(change) if change.relative else ''}"
            f"{limit}")


# a row's unit is its own: figures are written out before they become cells
_COLUMNS = [Column("quantity", "Quantity", "text"), Column("category", "Category", "text"),
            Column("module", "Module", "text"), Column("type", "Type", "text"), Column("modules", "Modules", "text"),
            Column("unit", "Unit", "text"), Column("before", "Before", "number"), Column("after", "After", "number"),
            Column("difference", "Change", "number"), Column("relative", "Relative", "number"),
            Column("share", "Share of the step", "number")]


def list_changes(change: ProfileChange, fmt: str = "text") -> str:
    """A row for each quantity of the step, category and module that differs."""
    check_layout(None, 0, fmt, "ProfileChange.table()")
    rows: list[list[object]] = []
    for row in (*change.totals, *change.categories, *change.modules):
        if row.is_changed:
            figures: list[object] = (
                [row.before, row.after, row.difference, row.relative, row.share] if fmt == "csv" else
                [*list_cells(row), None if row.relative is None else f"{row.relative:+.2%}",
                 None if row.share is None else f"{row.share:.2%}"])
            rows.append([row.quantity, row.category or "", row.module or "", row.type, row.modules or "", row.unit,
                         *figures])
    return print_data(_COLUMNS, rows, fmt)


_WIDTH, _HEIGHT = 120, 40
_LEAST_ROWS, _MOST_CATEGORIES = 3, 6
_TITLES = 4            # lines around the rows of a table


def render_comparison(change: ProfileChange) -> str:
    """Sections with a blank line between them; modules as many as fit on the screen."""
    changed, categories = list_changed(change)
    modules = [row for row in change.modules if is_explaining(row)]
    sections = ["\n".join([*(f"{side}: {describe_run(profile)[0]}" for side, profile in list_sides(change)),
                           *([_fill("not profiled alike", change.settings)] if change.settings else []),
                           *filter(None, [describe_ended(change)])])]
    if changed:
        sections.append(_print_quantities(HEADERS, changed))
    last = [text for text in (_print_notes(change), "\n".join(
        [f"fails if {describe_condition(row)}" for row in change.conditions])) if text]
    room = _HEIGHT - sum(text.count("\n") + 2 for text in (*sections, *last)) - (_TITLES if modules else 0)
    if categories:
        most = min(_MOST_CATEGORIES, max(_LEAST_ROWS, room - _TITLES - min(len(modules), _LEAST_ROWS)))
        sections.append(_print_quantities((BY_CATEGORY, *HEADERS[1:]), categories[:most]))
        sections[-1] += f"\n... {len(categories) - most} more" if len(categories) > most else ""
        room -= sections[-1].count("\n") + 2
    if modules:
        shown = _list_notable(modules)[:max(_LEAST_ROWS, room)]
        sections.append(print_rows(MODULE_HEADERS, [(_name_modules(row), row.type, row.header, *list_cells(row))
                                                    for row in shown], left=(0, 1, 2), ends=(0, 1)))
        rest = len(modules) - len(shown)
        sections[-1] += f"\n... {rest} smaller, which --format csv lists" if rest else ""
    return escape_controls("\n\n".join([*sections, *last]))


def _list_notable(rows: Sequence[QuantityChange]) -> list[QuantityChange]:
    return [row for i, row in enumerate(rows) if not i or row.share is None or row.share >= _LEAST_SHARE]


def _print_quantities(headers: Sequence[str], rows: Sequence[QuantityChange]) -> str:
    return print_rows(headers, [(row.header, *list_cells(row)) for row in rows])


def _print_notes(change: ProfileChange) -> str:
    lines = [_fill(title, said) for title, said in list_notes(change, 4)]
    if change.before.modules is None or change.after.modules is None:
        lines.append("modules: not compared, for a profile has none")
    if not change.is_changed:
        lines.append(_describe_extent(change))
    if said := list_unchanged(change):
        lines.append(_fill("unchanged", said))
    return "\n".join(lines)


def _fill(title: str, said: Sequence[str]) -> str:
    return textwrap.fill(f"{title}: " + ", ".join(said), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


_MOST_MODULES = 20


def to_markdown(change: ProfileChange, path: str | Path | None = None) -> str:
    """The summary as text, also written to ``path`` if one is given."""
    text = "\n\n".join(_list_blocks(change)) + "\n"
    if path is not None:
        write_output(path, text)
    return text


def _list_blocks(change: ProfileChange) -> Iterator[str]:
    yield f"### Cost of a step of {code(change.after.name)}: {describe_result(change)}"
    if first := describe_first(change):
        yield f"**{first}**"
    if change.settings:
        yield f"Not profiled alike: {', '.join(map(code, change.settings))}."
    if ended := describe_ended(change):
        yield f"{ended.capitalize()}."
    if change.conditions:
        cells = [[code(row[0]), *row[1:4], row[4] if row[4] == "ok" else f"**{row[4]}**"]
                 for row in map(list_condition_cells, change.conditions)]
        yield print_rows(CONDITION_HEADERS, cells, left=(0, 4), fmt="markdown")
    changed, categories = list_changed(change)
    if changed:
        yield print_rows(("Quantity", *HEADERS[1:]), [[row.header, *list_cells(row)] for row in changed],
                         fmt="markdown")
    if categories:
        yield from _fold("Memory at the peak by category", print_rows(
            ("Category", *HEADERS[1:]), [(code(row.header), *list_cells(row)) for row in categories], fmt="markdown"))
    yield from _list_modules(change)
    if same := ", ".join(map(_name, list_unchanged(change))):
        yield f"Unchanged: {same}."
    runs = [f"- {side}: {', '.join(map(code, describe_run(profile)))}" for side, profile in list_sides(change)]
    yield from _fold("What was profiled", "\n".join(runs))


def _list_modules(change: ProfileChange) -> Iterator[str]:
    rows = [row for row in change.modules if is_explaining(row)]
    shown = _list_notable(rows)[:_MOST_MODULES]
    kinds = {row.kind for row in change.structure}
    notes = sorted(list_notes(change, 10), key=lambda note: note[0] not in kinds)  # how it is built first
    lines = [f"- {title}: {', '.join(map(code if title in kinds else _name, said))}" for title, said in notes]
    table = print_rows(MODULE_HEADERS, [
        (code(_name_modules(row)), code(row.type), f"Peak: {code(row.category)}" if row.category else row.header,
         *list_cells(row)) for row in shown], left=(0, 1, 2), fmt="markdown") if shown else ""
    rest = f"{len(rows) - len(shown)} smaller changes are left out." if len(rows) > len(shown) else ""
    if body := "\n\n".join(block for block in (table, rest, "\n".join(lines)) if block):
        yield from _fold(f"Modules: {len(rows)} changes" if rows else "Modules", body)


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
