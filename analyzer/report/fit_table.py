"""The table of devices that a step fits on."""
from __future__ import annotations

from analyzer.results.fit_table import FitTable
from analyzer.results.view import register_view

from .column import check_layout, format_quantity, print_rows
from .text_width import escape_controls

_HEADERS = ("Device", "Memory", "Needed", "Free", "Fits", "Peak in")
_ANSWERS = {True: "yes", False: "no", None: "not known"}


@register_view.shipped("fit_rows")
def print_fits(table: FitTable, fmt: str = "text") -> str:
    """A row for each device."""
    check_layout(None, 0, fmt, "FitTable.table()")
    cells = [(row.device, format_quantity(row.capacity_bytes, "bytes"),
              (">= " if row.is_out_of_memory else "") + format_quantity(row.needed_bytes, "bytes"),
              format_quantity(row.free_bytes, "bytes"), _ANSWERS[row.fits], row.phase or "") for row in table]
    return print_rows(_HEADERS, cells, left=(0, 4, 5), fmt=fmt)


@register_view.shipped("fit_table")
def describe_fits(table: FitTable) -> str:
    """What was profiled, the table, and the devices that it fits on in a line."""
    return escape_controls(f"{table.title}\n\n{print_fits(table)}\n\n{table.said}")
