"""A comparison as one table."""
from __future__ import annotations

from analyzer.report.column import Column, check_layout, format_quantity
from analyzer.report.data_table import print_data
from analyzer.results.comparison import ProfileChange
from analyzer.results.view import register_view

from .wording import describe_change

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
