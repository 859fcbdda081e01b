"""The table that a sweep gives: one row a configuration, units in the names of its columns."""
from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.errors import InputError, MissingExtraError
from analyzer.output import check_output, write_output
from analyzer.report.export.json_format import MOST
from analyzer.report.page.document import write_page

from .configuration import AXES
from .sweep_page import list_sweep_parts

if TYPE_CHECKING:
    import pandas

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
#: The columns that tell two rows apart; versions among them, so that another torch does not go on with an old file.
IDENTITY = ("target", *AXES, "inputs", "torch_version", "analyzer_version")
FORMATS = (".csv", ".jsonl", ".parquet")

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
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                "to_dataframe() needs pandas, which is not installed: pip install "
                "'symbolic-analyzer[report]'") from error
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
        """Write a .csv, .jsonl or .parquet file. Raises InputError for others, MissingExtraError without pyarrow."""
        path = check_table(path)
        if path.suffix == ".parquet":
            write_output(path, _format_parquet(self.rows))
        else:
            write_output(path, self.to_csv() if path.suffix == ".csv" else self.to_jsonl())


def identify(row: Row) -> tuple[Any, ...]:
    """What tells a row from others; None stands for what it lacks."""
    return tuple(row.get(name) for name in IDENTITY)


def check_row(row: object) -> None:
    """Raise InputError for what is no row: one that lacks a column of `IDENTITY`, or has a value of another kind."""
    if not isinstance(row, dict):
        raise InputError(f"a {type(row).__name__}")
    for name in row:
        if name not in COLUMNS:
            raise InputError(f"it has {name[:80]!r}, which is no column")
    for name, kind in COLUMNS.items():
        value, kinds = row.get(name), (int, float) if kind is float else (kind,)
        if name not in row and name in IDENTITY:
            raise InputError(f"it has no {name!r}")
        is_number = type(value) in (int, float)
        if not (value is None or type(value) in kinds and not (is_number and not abs(value) < MOST)):
            raise InputError(f"{name!r} is {str(value)[:80]!r}, which is no {kind.__name__}")


def check_table(path: str | Path) -> Path:
    """``path``, if rows can be written there. Raises InputError or MissingExtraError, before the work is done."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: must end in {', '.join(FORMATS)}")
    check_output(path)
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                f"{path}: needs pyarrow, which is not installed: pip install 'symbolic-analyzer[sweep]'") from error
    return path


def _format_parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow.parquet

    kinds = {str: "string", int: "int64", float: "float64", bool: "bool"}
    columns = {name: pyarrow.array([row.get(name) for row in rows], kinds[kind]) for name, kind in COLUMNS.items()}
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()
