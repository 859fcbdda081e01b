"""A comparison as one table."""
from __future__ import annotations

from analyzer.report.column import FORMATS, Column, check_layout, format_quantity
from analyzer.report.data_table import print_data
from analyzer.results.comparison import ProfileChange
from analyzer.results.view import register_view

from .wording import describe_change

_TEXT = [Column("quantity", "Quantity", "text"), Column("category", "Category", "text"),
         Column("module", "Module", "text"), Column("type", "Type", "text"), Column("modules", "Modules", "text"),
         Column("unit", "Unit", "text"), Column("before", "Before", "text"), Column("after", "After", "text"),
         Column("difference", "Change", "text"), Column("relative", "Relative", "text"),
         Column("share", "Share of the step", "text")]


@register_view.shipped("comparison_rows")
def list_changes(change: ProfileChange, fmt: str = "text") -> str:
    """A row for each quantity of the step, category and module that differs."""
    check_layout(None, 0, fmt, "ProfileChange.table()")
    is_plain = FORMATS.get(fmt, fmt) == "csv"
    rows: list[list[object]] = []
    for row in (*change.totals, *change.categories, *change.modules):
        if row.is_changed:
            figures: list[object] = (
                [row.before, row.after, row.difference, row.relative, row.share] if is_plain else
                [format_quantity(row.before, row.unit), format_quantity(row.after, row.unit), describe_change(row),
                 None if row.relative is None else f"{row.relative:+.2%}",
                 None if row.share is None else f"{row.share:.2%}"])
            rows.append([row.quantity, row.category or "", row.module or "", row.type, row.modules or "", row.unit,
                         *figures])
    return print_data(_TEXT, rows, fmt)
