"""The node table with its ten columns."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from analyzer.results.node_info import NodeInfo
from analyzer.units import add_quantities

from .text_table import Column, check_layout, find_column, find_columns, name_columns, print_rows, sort_by

TEN_COLUMNS = (Column("op", "Op type", "text"), Column("name", "Op", "text"),
               Column("accumulate_bytes", "Accumulate size", "bytes"),
               Column("incremental_bytes", "Incremental size", "bytes"), Column("output_bytes", "Output size", "bytes"),
               Column("temp_bytes", "Temp size", "bytes"), Column("param_bytes", "Param size", "bytes"),
               Column("backward_bytes", "Backward size", "bytes"), Column("fwd_flops", "Fwd FLOPs", "count"),
               Column("bwd_flops", "Bwd FLOPs", "count"))
COLUMNS = name_columns(*TEN_COLUMNS, Column("fwd_macs", "Fwd MACs", "count"), Column("bwd_macs", "Bwd MACs", "count"),
                       Column("buffer_bytes", "Buffer size", "bytes"), Column("fwd_comm_bytes", "Fwd comm", "bytes"),
                       Column("bwd_comm_bytes", "Bwd comm", "bytes"), Column("fwd_seconds", "Fwd time", "seconds"),
                       Column("bwd_seconds", "Bwd time", "seconds"), Column("module_path", "Module", "text"),
                       Column("target", "Target", "text"), Column("source", "Source", "text"))
COMMUNICATION = (COLUMNS["fwd_comm_bytes"], COLUMNS["bwd_comm_bytes"])


def node_table(rows: Sequence[NodeInfo], sort: str | None = None, depth: int | None = None, columns: Sequence[str] = (),
               fmt: str = "text", communicates: bool = False) -> str:
    """The rows as text, with a last row of totals, which are marked ``>=`` where some cells are unknown (``-``).

    ``sort`` is a field or a heading, largest first; ``depth`` (1 or more) merges neighbouring nodes of the same module
    at that depth into one row; ``columns`` are fields to print after the ten; ``fmt`` is a format of `tabulate`.
    Where ranks communicate (``communicates``) in the step, the bytes of their messages stand after the ten too.
    Raises InputError for a name it does not know.
    """
    check_layout(depth, 1, fmt, "table()")
    extra = find_columns(COLUMNS, columns, "table()")
    shown = [*TEN_COLUMNS, *extra, *(c for c in COMMUNICATION if communicates and c not in extra)]
    return print_nodes(rows, shown, sort, depth, fmt)


def print_nodes(rows: Sequence[NodeInfo], shown: Sequence[Column], sort: str | None, depth: int | None,
                fmt: str) -> str:
    """The node table with these columns; the second is the node's name."""
    merged = list(rows) if depth is None else merge_modules(rows, depth)
    if sort is not None:
        key = find_column(COLUMNS, sort, "table(sort=...)")
        merged = sort_by(merged, attrgetter(key.field), descending=key.unit != "text")
    cells = [[column.format(getattr(row, column.field)) for column in shown] for row in merged]
    left = [i for i, column in enumerate(shown) if column.unit == "text"]
    return print_rows([column.header for column in shown], cells, left=left, ends=left, fmt=fmt,
                      total=format_totals(shown, rows))


def format_totals(columns: Sequence[Column], rows: Sequence[NodeInfo]) -> list[str]:
    """The last row: sums; Accumulate is a running sum and ends at its last value."""
    cells = []
    for column in columns[2:]:
        if column.unit == "text":
            cells.append("")
        elif column.field == "accumulate_bytes":
            cells.append(column.format(rows[-1].accumulate_bytes if rows else 0))
        else:
            cells.append(column.format_total(getattr(row, column.field) for row in rows))
    return ["total", f"{len(rows)} nodes", *cells]


def merge_modules(rows: Sequence[NodeInfo], depth: int) -> list[NodeInfo]:
    """Neighbours in the same module at ``depth`` as one row; a row that stands alone, or outside, stays as it is."""

    def module_of(row: NodeInfo) -> str | None:
        parts = row.module_path.split(".") if row.module_path else []
        return ".".join(parts[:depth]) if len(parts) >= depth else None

    merged: list[NodeInfo] = []
    for path, group in groupby(rows, module_of):
        members = list(group)
        if path is None or len(members) == 1:
            merged += members
            continue
        sums = {column.field: add_quantities(getattr(row, column.field) for row in members)
                for column in COLUMNS.values() if column.unit != "text"}
        sums["accumulate_bytes"] = members[-1].accumulate_bytes
        merged.append(replace(NodeInfo("module", path, path, path), **sums))  # type: ignore[arg-type]
    return merged
