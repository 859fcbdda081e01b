"""The table that a sweep gives, and its rows as a page."""
from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.errors import InputError
from analyzer.output import check_output, write_output
from analyzer.report.export.table_file import import_pandas
from analyzer.report.page.document import Headline, Panel, Tile, headline_part, write_page
from analyzer.units import format_bytes, format_seconds

from .configuration import AXES

if TYPE_CHECKING:
    import pandas

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


def list_sweep_parts(rows: Sequence[Row]) -> list[Panel]:
    done = [row for row in rows if row.get("error") is None]
    failed = [row for row in rows if row.get("error") is not None]
    found = describe_sweep(done)
    parts = [sweep_headline(done, failed)]
    if found is not None:
        parts.append(Panel("sweep", "Configurations", found))
    if failed:
        parts.append(Panel("failed", "Failed configurations", {
            "dimensions": list_dimensions(failed, least=0), "error": [str(row["error"]) for row in failed]},
            has_chart=False))
    return parts


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
    return {"dimensions": list_dimensions(rows), "fits": list_fits(rows), "quantities": known, "x": titles[0],
            "y": next(title for title in wanted if title in titles)}


def list_fits(rows: Sequence[Row]) -> list[str]:
    return ["unknown" if row.get("fits") is None else "yes" if row["fits"] else "no" for row in rows]


def list_dimensions(rows: Sequence[Row], axes: Sequence[str] = ("target", *AXES),
                    least: int = 1) -> list[dict[str, Any]]:
    """The ``axes`` that have more than ``least`` values among the rows, as text."""
    found = []
    for name in axes:
        values = [row.get(name) for row in rows]
        if len(set(values)) > least and any(value is not None for value in values):
            # None last, numbers by their size
            order = sorted(set(values), key=lambda value: (
                value is None, *((float(value), "") if isinstance(value, (int, float)) else (0.0, str(value)))))
            found.append({"title": name, "values": list(map(_word, values)), "order": list(map(_word, order))})
    return found


def _word(value: Any) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def sweep_headline(done: Sequence[Row], failed: Sequence[Row]) -> Panel:
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


Row = dict[str, Any]

#: What a row holds, in order. All but those of the configuration are None where it failed; None is unknown.
COLUMNS: dict[str, type] = {
    "target": str, "batch": int, "sequence": int, "dtype": str, "optimizer": str, "autocast": str,
    "checkpointing": bool, "device": str, "mode": str, "quantize": str, "lora": str, "accumulate": int, "inputs": str,
    "error": str,  # why there are no figures
    "fits": bool,
    "free_bytes": int,  # as `Profile.fits` says
    "peak_allocated_bytes": int, "peak_reserved_bytes": int,
    # steady state
    "forward_peak_allocated_bytes": int, "backward_peak_allocated_bytes": int, "optimizer_peak_allocated_bytes": int,
    "params": int, "param_bytes": int, "buffer_bytes": int, "optimizer_bytes": int, "fwd_flops": int, "bwd_flops": int,
    "recompute_flops": int, "optimizer_flops": int, "fwd_macs": int, "bwd_macs": int, "fwd_seconds": float,
    "bwd_seconds": float, "optimizer_seconds": float, "step_seconds": float, "kernel_seconds": float, "tokens": int,
    "samples_per_second": float, "tokens_per_second": float, "mfu": float, "hfu": float, "seconds_method": str,
    "uncounted_calls": int,  # of operators without a FLOP formula
    "assumptions": str,  # joined by "; "
    "profile_seconds": float,  # what this row itself took
    "torch_version": str, "analyzer_version": str}
FORMATS = (".csv", ".jsonl")

_PANDAS = {str: "string", int: "Int64", float: "Float64", bool: "boolean"}  # its nullable types


@dataclass(frozen=True)
class SweepResult:
    """Rows in the order of the grid; `COLUMNS` says what each holds.

    >>> done, failed = {"batch": 1, "peak_reserved_bytes": 512}, {"batch": 2, "error": "ValueError: no"}
    >>> result = SweepResult(({"target": "demo", **done}, {"target": "demo", **failed}))
    >>> len(result.failed), result.to_csv().splitlines()[2][:7]
    (1, 'demo,2,')
    """

    rows: tuple[Row, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows with an error in place of figures."""
        return tuple(row for row in self.rows if row.get("error") is not None)

    def to_dataframe(self) -> pandas.DataFrame:
        """The rows as a table of nullable columns. Raises MissingExtraError without pandas."""
        pandas = import_pandas()
        return pandas.DataFrame({name: pandas.Series([row.get(name) for row in self.rows], dtype=_PANDAS[kind])
                                 for name, kind in COLUMNS.items()})

    def to_csv(self) -> str:
        """The rows as CSV text; an empty cell is unknown."""
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def to_jsonl(self) -> str:
        """The rows as JSON, one a line."""
        return "".join(json.dumps(row) + "\n" for row in self.rows)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the rows as text, also written to ``path`` if one is given: a scatter of two quantities with its
        Pareto front, a table, and what failed. Raises MissingExtraError without plotly.
        """
        name = next((str(row["target"]) for row in self.rows if row.get("target")), "a model")
        return write_page(f"Configurations of {name}", list_sweep_parts(self.rows), path)

    def write(self, path: str | Path) -> None:
        """Write a .csv or .jsonl file. Raises InputError for others."""
        path = check_table(path)
        write_output(path, self.to_csv() if path.suffix == ".csv" else self.to_jsonl())


def check_table(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: must end in {' or '.join(FORMATS)}")
    check_output(path)
    return path
