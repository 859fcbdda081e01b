"""The columns of reports, and tables of text that are as wide as the terminal."""
from __future__ import annotations

import csv
import difflib
import io
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import tabulate

from analyzer.errors import InputError, is_count
from analyzer.units import UNKNOWN, format_bytes, format_count, format_percent, format_seconds

from .screen.layout import find_width
from .text_width import escape_controls, fit_table, measure_width

T = TypeVar("T")
_FORMATS: dict[str, Callable[..., str]] = {
    "bytes": format_bytes, "Mb": partial(format_bytes, style="Mb"), "count": format_count, "seconds": format_seconds,
    "share": format_percent, "number": str}

#: Table formats by what users call them; any other is one of tabulate's.
FORMATS = {"text": "simple", "markdown": "github", "latex": "latex", "html": "html", "csv": "csv"}
_PIPED = ("github", "pipe")  # formats in which a bar ends a cell


@dataclass(frozen=True, slots=True)
class Column:
    """A field of a row, its heading and its unit: bytes, Mb (bytes as Colossal-AI labels them), count, number (a whole
    one that is printed as it is), seconds, share, text.
    """

    field: str
    header: str
    unit: str

    def format(self, value: object) -> str:
        """One cell; an unknown value is printed as such."""
        return format_quantity(value, self.unit)

    def format_total(self, values: Iterable[float | None]) -> str:
        """The sum of a column; what is known of it, marked as a lower bound, where some cells are unknown."""
        all_values = list(values)
        known = [value for value in all_values if value is not None]
        if not known:
            return format_quantity(None if all_values else 0, self.unit)
        return ("" if len(known) == len(all_values) else ">= ") + self.format(sum(known))


def format_quantity(value: object, unit: str) -> str:
    """Text of one value in its unit."""
    if value is None:
        return UNKNOWN
    return str(value) if unit == "text" else _FORMATS[unit](value)


def name_columns(*columns: Column) -> dict[str, Column]:
    """Columns by field."""
    return {column.field: column for column in columns}


def find_column(columns: Mapping[str, Column], name: str, caller: str) -> Column:
    """The column of that field or heading; InputError, with the nearest names, if there is none."""
    by_header = {column.header.lower(): column for column in columns.values()}
    found = columns.get(name) or by_header.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        name = str(name)
        near = difflib.get_close_matches(name, columns, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{caller}: no column {name!r}; {hint}columns are {', '.join(columns)}")
    return found


def find_columns(columns: Mapping[str, Column], names: Iterable[str], caller: str) -> list[Column]:
    """The columns of these fields or headings. Raises InputError for one that there is not."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InputError(f"{caller}: columns={names!r}: give names of columns, as in columns=['fwd_macs']")
    return [find_column(columns, name, f"{caller.removesuffix('()')}(columns=...)") for name in names]


def sort_by(rows: Iterable[T], key: Callable[[T], Any], *, descending: bool = True) -> list[T]:
    """The rows in the order of a quantity or text of theirs; those in which it is unknown come last."""
    keyed = [(key(row), row) for row in rows]
    known = sorted([(value, row) for value, row in keyed if value is not None], key=itemgetter(0), reverse=descending)
    return [row for _, row in known] + [row for value, row in keyed if value is None]


def check_layout(depth: int | None, least_depth: int, fmt: str, caller: str) -> None:
    """Raise InputError for a depth or a table format that cannot be printed."""
    if depth is not None and not is_count(depth, least_depth):
        raise InputError(f"{caller}: depth={depth!r}; give a depth of {least_depth} or more, or None for all")
    if fmt not in FORMATS and fmt not in tabulate.tabulate_formats:
        raise InputError(
            f"{caller}: no table format {fmt!r}; formats are "
            f"{', '.join(dict.fromkeys([*FORMATS, *tabulate.tabulate_formats]))}")


def print_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0, ),
               ends: Collection[int] = (), fmt: str = "text", total: Sequence[str] | None = None,
               indent: int = 0) -> str:
    """Rows as a table: the columns ``left`` hold text (``ends`` paths, whose ends say most), the others quantities, and
    ``total`` stands under a line. In the format ``text`` it is as wide as the terminal at most, less ``indent``, and in
    a pipe or a file 120 columns; in ``simple`` as wide as its cells.
    """
    is_fitted, fmt = fmt == "text", FORMATS.get(fmt, fmt)
    rows = [[escape_controls(cell) for cell in row] for row in rows]
    if fmt in _PIPED:
        rows = [[cell.replace("|", r"\|").replace("\n", "<br>") for cell in row] for row in rows]
    if fmt == "csv":
        rows = [[guard_formula(cell) if i in left else cell for i, cell in enumerate(row)] for row in rows]
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows([headers, *rows, *([] if total is None else [total])])
        return written.getvalue().rstrip("\n")
    body: list[object] = list(rows)
    if total is not None:
        body += [tabulate.SEPARATING_LINE, total] if rows and fmt == "simple" else [total]
    align = ["left" if i in left else "right" for i in range(len(headers))]
    text: str = tabulate.tabulate(body, headers=headers, tablefmt=fmt, disable_numparse=True,
                                  colalign=align if body else None)
    width = find_width(sys.stdout) - indent
    if is_fitted and max(map(measure_width, text.splitlines()), default=0) > width:
        return fit_table([headers, *rows, *([] if total is None else [total])], width, left, ends, total is not None)
    return text


def guard_formula(text: str) -> str:
    """A cell of text for a spreadsheet, which takes what begins so for a formula; an apostrophe makes it text."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and text != UNKNOWN else text
