"""The rows of a sweep as parts of a page: a scatter of two quantities with its Pareto front, and tables."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzer.report.page.answer import Headline, Tile
from analyzer.report.page.document import Part
from analyzer.report.page.headline import headline_part
from analyzer.units import format_bytes, format_seconds

from .configuration import AXES

Row = Mapping[str, Any]

#: What the axes can be: title, unit, the column, and whether more of it is better.
_QUANTITIES = (
    ("Peak reserved", "bytes", "peak_reserved_bytes", False),
    ("Peak allocated", "bytes", "peak_allocated_bytes", False),
    ("Free", "bytes", "free_bytes", True), ("Step", "seconds", "step_seconds", False),
    ("Samples a second", "count", "samples_per_second", True), ("Tokens a second", "count", "tokens_per_second", True),
    ("MFU", "share", "mfu", True), ("HFU", "share", "hfu", True), ("Fwd FLOPs", "count", "fwd_flops", False),
    ("Bwd FLOPs", "count", "bwd_flops", False), ("Recomputed FLOPs", "count", "recompute_flops", False),
    ("Optimizer states", "bytes", "optimizer_bytes", False), ("Parameters", "count", "params", False))
#: Seconds of the device that a unit of work takes, which compare steps of different sizes: title, and the rate.
_COSTS = (("Time a token", "tokens_per_second"), ("Time a sample", "samples_per_second"))
#: Axes of a grid by which steps do different amounts of work.
_SIZES = ("batch", "sequence", "accumulate")


def list_sweep_parts(rows: Sequence[Row]) -> list[Part]:
    """The parts of the page of a sweep; without a row that has figures there is no chart."""
    done, failed = split_rows(rows)
    found = describe_sweep(done)
    parts = [sweep_headline(done, failed)]
    if found is not None:
        parts.append(Part("sweep", "Configurations", found))
    if failed:
        parts.append(Part("failed", "Failed configurations", describe_failed(failed), has_chart=False))
    return parts


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows with figures, and those with an error in their place."""
    return ([row for row in rows if row.get("error") is None], [row for row in rows if row.get("error") is not None])


def describe_sweep(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The rows by column: what varies among them as text, and the quantities that are known of some; None where no two
    are. ``x`` and ``y`` are the axes to begin with: steps that do different amounts of work are compared by the time
    of a token or a sample, others by their own.
    """
    quantities: list[dict[str, Any]] = [
        {"title": title, "unit": unit, "more": more, "values": [row.get(name) for row in rows]}
        for title, unit, name, more in _QUANTITIES]
    quantities += [{"title": title, "unit": "seconds", "more": False,
                    "values": [1 / rate if (rate := row.get(name)) else None for row in rows]}
                   for title, name in _COSTS]
    known = [q for q in quantities if any(value is not None for value in q["values"])]
    if len(known) < 2:
        return None
    titles = [q["title"] for q in known]
    sizes_vary = any(len({row.get(name) for row in rows}) > 1 for name in _SIZES)
    wanted = [*(title for title, _ in _COSTS if sizes_vary), "Step", *titles[1:]]
    fits = ["unknown" if row.get("fits") is None else "yes" if row["fits"] else "no" for row in rows]
    return {"dimensions": list_dimensions(rows), "fits": fits, "quantities": known, "x": titles[0],
            "y": next(title for title in wanted if title in titles)}


def describe_failed(rows: Sequence[Row]) -> dict[str, Any]:
    """Configurations that have no figures, and why."""
    return {"dimensions": list_dimensions(rows, least=0), "error": [str(row["error"]) for row in rows]}


def list_dimensions(rows: Sequence[Row], least: int = 1) -> list[dict[str, Any]]:
    """The axes of the grid that have more than ``least`` values among the rows, as text.

    >>> list_dimensions([{"batch": 1, "lora": None}, {"batch": 2, "lora": None}])
    [{'title': 'batch', 'values': ['1', '2'], 'order': ['1', '2']}]
    """
    found = []
    for name in ("target", *AXES):
        values = [row.get(name) for row in rows]
        if len(set(values)) > least and any(value is not None for value in values):
            order = sorted(set(values), key=lambda value: (value is None, *_key(value)))
            found.append({"title": name, "values": [_word(value) for value in values],
                          "order": [_word(value) for value in order]})
    return found


def _key(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, (int, float)) else (0.0, str(value))


def _word(value: Any) -> str:
    return "none" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def sweep_headline(done: Sequence[Row], failed: Sequence[Row]) -> Part:
    """What a sweep found, in a sentence and a row of figures."""
    rows = [*done, *failed]
    fitting = [row for row in done if row.get("fits")]
    unknown = sum(row.get("fits") is None for row in done)
    said = f"{len(fitting)} of {len(rows)} configurations fit their device"
    if done and unknown == len(done):
        said = f"which of {len(rows)} configurations fit their device is not known"
    elif unknown:
        said += f"; of {unknown} it is not known"
    tiles = [Tile("Configurations", str(len(rows)), f"{len(failed)} failed" if failed else "")]
    best: tuple[tuple[str, str, Any, Any], ...] = (
        ("Least memory", "peak_reserved_bytes", format_bytes, min),
        ("Shortest step", "step_seconds", format_seconds, min),
        ("Most tokens a second", "tokens_per_second", lambda rate: f"{rate:,.0f}", max))
    varying = [dimension["title"] for dimension in list_dimensions(rows)]
    for title, name, write, choose in best:
        known = [row for row in fitting if row.get(name) is not None]
        if known:
            row = choose(known, key=lambda row: row[name])
            where = ", ".join(f"{axis} {_word(row.get(axis))}" for axis in varying)
            tiles.append(Tile(title, write(row[name]), where, "Of those that fit."))
    return headline_part(Headline.of(None, said), tiles)
