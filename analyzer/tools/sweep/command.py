"""``analyzer sweep``: the command line of `sweep`."""
from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from analyzer.errors import InputError, MissingExtraError
from analyzer.output import print_error
from analyzer.report.node_table import format_quantity, print_rows
from analyzer.report.page.document import check_page
from analyzer.report.progress_bar import ProgressBar

from .configuration import AXES
from .result import Row, SweepResult, check_table
from .run import SweepInterrupted, sweep

_SIZES = ("batch", "sequence", "accumulate")
_SWITCH = {"no": False, "yes": True}


def run_sweep(arguments: argparse.Namespace) -> int:
    """``analyzer sweep``; the result is the exit code."""
    grid = {axis: _read_values(axis, getattr(arguments, axis)) for axis in AXES if getattr(arguments, axis) is not None}
    if not grid:
        raise InputError("sweep: nothing varies; give values, e.g. --batch 1,2,4")
    if arguments.out is not None:
        check_table(arguments.out)
    check_page(arguments.html)
    bar = ProgressBar(among_output=True)

    def show(done: int, total: int, row: Row) -> None:
        bar(done / total, f"{done} of {total}")

    interruption = ""
    try:
        with bar, _connect(arguments.dask) as executor:
            found = sweep(arguments.target, grid, inputs=arguments.input, executor=executor, workers=arguments.workers,
                          progress=show)
    except SweepInterrupted as stop:
        interruption, found = f"interrupted: {stop}", stop.result
    finally:
        bar.clear()
    if interruption:
        print_error(interruption)
    if arguments.html is not None:
        found.to_html(arguments.html)
    print(format_rows(found))
    if arguments.out is not None:
        found.write(arguments.out)
    if interruption:
        return 130  # as shells report SIGINT
    return 1 if len(found.failed) == len(found.rows) else 0


def _read_values(axis: str, text: str) -> list[Any]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if axis in _SIZES and not word.isdecimal():
            raise InputError(f"--{axis} {text}: {word!r} is not a whole number")
        if axis == "checkpointing" and word not in _SWITCH:
            raise InputError(f"--{axis} {text}: {word!r} is neither 'no' nor 'yes'")
    if axis in _SIZES:
        return list(map(int, words))
    return [_SWITCH[word] if axis == "checkpointing" else None if word == "none" else word for word in words]


@contextlib.contextmanager
def _connect(address: str | None) -> Iterator[Executor | None]:
    """The executor of the Dask cluster at ``address``."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtraError(
            f"--dask {address}: Dask is not installed: pip install 'symbolic-analyzer[sweep]'") from error
    connect: Any = Client  # untyped
    try:
        client = connect(address)
    except (OSError, ValueError) as error:
        raise InputError(f"--dask {address}: no scheduler answers there: {error}") from error
    with client:
        yield client.get_executor()


_SHOWN = (("peak_reserved_bytes", "Peak reserved", "bytes"), ("free_bytes", "Free", "bytes"), ("fits", "Fits", "text"),
          ("fwd_flops", "Fwd FLOPs", "count"), ("bwd_flops", "Bwd FLOPs", "count"), ("step_seconds", "Step", "seconds"),
          ("mfu", "MFU", "share"))
_ERROR_WIDTH = 60  # of the table on the screen; files hold the whole text


def format_rows(result: SweepResult) -> str:
    """The rows as a table: what varies, and the chief figures.

    >>> rows = {"batch": 1, "fits": True, "free_bytes": 1024}, {"batch": 2, "error": "ValueError: no"}
    >>> print(format_rows(SweepResult(rows)))
    batch      Peak reserved      Free  Fits      Fwd FLOPs    Bwd FLOPs    Step    MFU  Error
    -------  ---------------  --------  ------  -----------  -----------  ------  -----  --------------
    1                      -  1.00 KiB  yes               -            -       -      -
    2                      -         -  -                 -            -       -      -  ValueError: no
    """
    rows = result.rows
    varying = [axis for axis in AXES if len({row.get(axis) for row in rows}) > 1]
    headers = [*varying, *(header for _, header, _ in _SHOWN), *(["Error"] if result.failed else [])]
    lines = [[*(_word(row.get(axis), "none") for axis in varying),
              *(_word(row.get(name), "-") if unit == "text" else format_quantity(row.get(name), unit)
                for name, _, unit in _SHOWN),
              *([(row.get("error") or "").split("\n")[0][:_ERROR_WIDTH]] if result.failed else [])] for row in rows]
    return print_rows(headers, lines, left=[i for i, name in enumerate(headers) if name in (*varying, "Fits", "Error")])


def _word(value: Any, unknown: str) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: unknown}[value]
    return format_quantity(value, "text")
