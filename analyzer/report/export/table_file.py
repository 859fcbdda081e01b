"""Rows of a profile as a table in a file: CSV, Markdown, LaTeX or Parquet."""
from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analyzer.errors import InputError, MissingExtraError
from analyzer.output import check_output, write_output
from analyzer.report.column import Column
from analyzer.report.data_table import DataTable, print_data, read_modules, read_nodes
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

_SPANS = tuple(Column(name, name.replace("_", " ").capitalize(), unit) for name, unit in (
    ("lane", "text"), ("kind", "text"), ("name", "text"), ("operator", "text"), ("node", "text"),
    ("module_path", "text"), ("phase", "text"), ("start_seconds", "seconds"), ("seconds", "seconds"),
    ("launch", "number")))
_EVENTS = tuple(Column(name, name.capitalize(), unit) for name, unit in (
    ("action", "text"), ("address", "number"), ("bytes", "bytes"), ("label", "text"), ("category", "text")))
_COMM = tuple(Column(name, name.replace("_", " ").capitalize(), unit) for name, unit in (
    ("kind", "text"), ("group", "text"), ("ranks", "number"), ("bytes", "bytes"), ("wire_bytes", "bytes"),
    ("phase", "text"), ("module_path", "text"), ("node", "text"), ("operator", "text"), ("peer", "number"),
    ("start_seconds", "seconds"), ("seconds", "seconds"), ("exposed_seconds", "seconds")))


def _read_rows(columns: tuple[Column, ...], name: str) -> Callable[[Profile, bool], DataTable]:
    """Reads the records of a field of a profile into a table."""
    def read(profile: Profile, is_whole: bool) -> DataTable:
        records = getattr(profile, name) or ()
        return DataTable(columns, [[getattr(record, column.field) for column in columns] for record in records])
    return read


#: What of a profile can be a table; the second argument asks for all quantities, not for those that are printed.
TABLES: Mapping[str, Callable[[Profile, bool], DataTable]] = {
    "nodes": read_nodes, "modules": read_modules, "spans": _read_rows(_SPANS, "spans"),
    "memory_events": _read_rows(_EVENTS, "memory_events"), "comm": _read_rows(_COMM, "comm")}
#: Formats by the endings of their files.
FORMATS = {".csv": "csv", ".md": "markdown", ".tex": "latex", ".parquet": "parquet"}


@register_exporter.shipped("table")
def export_table(profile: Profile, path: str | Path | None = None, what: str = "nodes",
                 fmt: str | None = None) -> str | bytes:
    """A row for each of ``what``, also written to ``path`` if one is given: ``"nodes"``, ``"modules"`` (parents first),
    ``"spans"``, ``"memory_events"`` or ``"comm"`` (calls that communicate).

    ``fmt`` is ``"csv"``, ``"markdown"``, ``"latex"`` or ``"parquet"`` (bytes), by default what the ending of ``path``
    says, without one CSV. In CSV and Parquet all quantities are unrounded under the names of their fields, and empty or
    null where unknown; a text in CSV that a spreadsheet would take for a formula begins with an apostrophe. In the
    others are those of the printed tables, in their units. Raises InputError for another ``what``, ``fmt`` or ending,
    MissingExtraError for Parquet without pyarrow.

    >>> from analyzer.results.span import SpanInfo
    >>> span = SpanInfo("compute", "kernel", "fc", "aten.addmm.default", "fc", "fc", "forward", 5e-6, 2e-6)
    >>> print(Profile(name="Net", mode="infer", spans=(span,)).export("table", what="spans"))
    lane,kind,name,operator,node,module_path,phase,start_seconds,seconds,launch
    compute,kernel,fc,aten.addmm.default,fc,fc,forward,5e-06,2e-06,
    """
    if what not in TABLES:
        raise InputError(f"export('table', what={what!r}): choose one of {', '.join(map(repr, TABLES))}")
    chosen = find_format(path) if fmt is None else fmt
    if chosen not in FORMATS.values():
        raise InputError(f"export('table', fmt={fmt!r}): choose one of {', '.join(map(repr, FORMATS.values()))}")
    found = TABLES[what](profile, chosen in ("csv", "parquet"))
    text = _write_parquet(found) if chosen == "parquet" else print_data(*found, chosen)
    if path is not None:
        write_output(path, text + "\n" if isinstance(text, str) else text)
    return text


def find_format(path: str | Path | None) -> str:
    """The format of a file by its ending, CSV where there is no file. Raises InputError for another ending."""
    if path is None:
        return "csv"
    found = FORMATS.get(Path(path).suffix.lower())
    if found is None:
        raise InputError(f"table {str(path)!r}: must end in {', '.join(FORMATS)}")
    return found


def check_table(path: str | Path) -> None:
    """Raise, before the work, what writing a table to ``path`` would raise."""
    if find_format(path) == "parquet":
        _import_pyarrow()
    check_output(path)


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("a table in Parquet needs pyarrow, which is not installed: pip install "
                                "'symbolic-analyzer[report]', or write .csv, .md or .tex") from error
    return pyarrow


def _encodable(value: Any) -> Any:
    """A value whose text UTF-8 has: half a surrogate pair stands as its escape."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _write_parquet(table: DataTable) -> bytes:
    pyarrow = _import_pyarrow()
    kinds = {"text": pyarrow.string(), "seconds": pyarrow.float64(), "share": pyarrow.float64()}
    arrays = {column.field: pyarrow.array([_encodable(row[i]) for row in table.rows],
                                          type=kinds.get(column.unit, pyarrow.int64()))
              for i, column in enumerate(table.columns)}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()
