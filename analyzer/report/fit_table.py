"""The devices that a step fits on, as a table by which to choose one."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from analyzer.errors import InputError
from analyzer.results.verdict import USUAL_HEADROOM, FitRow, FitTable
from analyzer.units import UNKNOWN, format_count, format_ends, format_seconds

from .text_table import check_layout, format_quantity, print_rows
from .text_width import escape_controls
from .verdict import NOT_COUNTED

SORTS = ("memory", "time", "price")
#: devices share a row where the steps differ by less than this, which is less than the least range that is told
_ALIKE_SECONDS = 0.05
_WIDEST = 24  # columns of the names in a row: those of the longest name of the catalogue
_LIMIT = math.inf  # where a key is unknown it comes last
_ANSWERS = {True: "yes", False: "no", None: "not known"}


def sort_rows(table: FitTable, sort: str = "memory") -> list[FitRow]:
    """The rows by the memory, time or price of a device; those that fit come first, those that do not last. Raises
    InputError for another order, and for prices that were not told.
    """
    if sort not in SORTS:
        raise InputError(f"sort={sort!r}: must be one of {', '.join(map(repr, SORTS))}")
    if sort == "price" and all(row.dollars_per_hour is None for row in table):
        raise InputError("sort='price': no price is known; give prices=, or --price, as h100=2.5,l40s=0.9")
    name = {"memory": "capacity_bytes", "time": "step_seconds", "price": "dollars_per_million"}[sort]

    def place(row: FitRow) -> tuple[int, float]:
        value: float | None = getattr(row, name)
        return _rank(table, row), _LIMIT if value is None else value

    return sorted(table, key=place)


def _rank(table: FitTable, row: FitRow) -> int:
    return 0 if table.headroom.is_left(row) else 1 if row.fits else 2 if row.fits is None else 3


def print_fits(table: FitTable, fmt: str = "text", sort: str = "memory") -> str:
    """A row for each device, or in text for devices that differ in no more than their name."""
    check_layout(None, 0, fmt, "FitTable.table()")
    rows = sort_rows(table, sort)
    tokens = any(row.tokens_per_second is not None for row in rows)
    priced = any(row.dollars_per_hour is not None for row in rows)
    what = "tokens" if tokens else "samples"
    headers = ["Device", "Memory", "Needed", "Free", "Headroom", "Fits", "Step", f"{what.capitalize()}/s"]
    headers += [f"$/M {what}"] if priced else []
    cells = [(names, *_describe(table, row), *([_format_dollars(row.dollars_per_million)] if priced else []))
             for names, row in (_join(rows) if fmt == "text" else ((row.device, row) for row in rows))]
    return print_rows(headers, cells, left=(0, 5), fmt=fmt)


def _join(rows: Iterable[FitRow]) -> Iterator[tuple[str, FitRow]]:
    """The rows to print: the first of those that are alike, with the names of all."""
    groups: list[tuple[list[str], FitRow]] = []
    for row in rows:
        for names, first in groups:
            if _are_alike(first, row) and len(", ".join([*names, row.device])) <= _WIDEST:
                names.append(row.device)
                break
        else:
            groups.append(([row.device], row))
    yield from ((", ".join(names), row) for names, row in groups)


def _are_alike(one: FitRow, other: FitRow) -> bool:
    """Whether rows of two devices would say the same but for their names, and a little time."""
    same = all(format_quantity(getattr(one, name), "bytes") == format_quantity(getattr(other, name), "bytes")
               for name in ("capacity_bytes", "needed_bytes"))
    if not same or (one.fits, one.dollars_per_hour) != (other.fits, other.dollars_per_hour):
        return False
    a, b = one.step_seconds, other.step_seconds
    return a == b if a is None or b is None else abs(a - b) <= _ALIKE_SECONDS * max(a, b)


def _describe(table: FitTable, row: FitRow) -> tuple[str, ...]:
    answer = _ANSWERS[row.fits]
    if row.fits and not table.headroom.is_left(row):
        answer = "too little left"
    elif row.is_tight:
        answer = "barely"
    step = format_quantity(row.step_seconds, "seconds")
    if row.step_seconds_range is not None and row.step_seconds is not None:
        step += f" ({format_ends(step, map(format_seconds, row.step_seconds_range))})"
    rate = row.tokens_per_second or row.samples_per_second
    left = UNKNOWN if row.headroom is None or row.headroom < 0 else f"{row.headroom:.0%}"
    return (format_quantity(row.capacity_bytes, "bytes"),
            (">= " if row.is_out_of_memory else "") + format_quantity(row.needed_bytes, "bytes"),
            format_quantity(row.free_bytes, "bytes"), left, answer, step,
            UNKNOWN if rate is None else format_count(rate))


def _format_dollars(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def describe_fits(table: FitTable, sort: str = "memory") -> str:
    """What was profiled, the table, and the devices that it fits on in a line."""
    text = f"{table.title}\n\n{print_fits(table, sort=sort)}\n\n{table.said}"
    if any(row.is_tight for row in table):
        text += f"\nbarely: less than {USUAL_HEADROOM} is left for {NOT_COUNTED}"
    return escape_controls(text)
