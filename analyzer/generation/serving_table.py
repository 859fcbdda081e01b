"""Numbers of sequences beside each other: speed, memory, and whether it fits."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analyzer.report.column import Column, check_layout
from analyzer.report.data_table import print_data

from .serving import ServingPoint

_COLUMNS = (
    Column("sequences", "Sequences", "text"), Column("decode_seconds", "Decode pass", "seconds"),
    Column("tokens_per_second", "Tokens/s", "count"), Column("decode_read_bytes", "Read", "bytes"),
    Column("prefill_seconds", "Prefill chunk", "seconds"), Column("cache_bytes", "Cache", "bytes"),
    Column("activation_bytes", "Activations", "bytes"), Column("peak_reserved_bytes", "Peak reserved", "bytes"),
    Column("fits", "Fits", "text"))


def serving_table(points: Sequence[ServingPoint], fmt: str = "text") -> str:
    """A row for each number of sequences; ``fmt`` is as of `GenerationProfile.table`, in CSV figures are unrounded."""
    check_layout(None, 0, fmt, "serving_table()")
    rows = [[values[column.field] for column in _COLUMNS] for values in map(_list_values, points)]
    if fmt == "csv":
        return print_data(_COLUMNS, rows, fmt)
    said = {True: "yes", False: "no", None: "not known"}
    return print_data(_COLUMNS, [[*row[:-1], said[row[-1]]] for row in rows], fmt)


def _list_values(point: ServingPoint) -> dict[str, Any]:
    values = {name: getattr(point, name) for name in ("sequences", "tokens_per_second", "cache_bytes",
                                                      "activation_bytes", "fits")}
    for way, cost in (("prefill", point.prefill), ("decode", point.decode)):
        values[f"{way}_seconds"] = None if cost is None else cost.seconds
    return {**values, "decode_read_bytes": None if point.decode is None else point.decode.read_bytes,
            "peak_reserved_bytes": point.profile.peak_reserved_bytes}


def tell_which_fit(points: Sequence[ServingPoint]) -> str:
    """A line for those that fit, one for those that do not, and one for those of which that is not known."""
    lines = []
    for fits, said in ((True, "fit on"), (False, "do NOT fit on"), (None, "cannot be told whether they fit on")):
        found = [point for point in points if point.fits is fits]
        if found:
            numbers = ", ".join(f"{point.sequences:,}" for point in found)
            lines.append(f"{said} {found[0].device}: {numbers} sequences of {found[0].context_tokens:,} tokens")
    return "\n".join(lines)
