"""Several profiles as one table with a row each: models, or one model under several settings."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.errors import InputError
from analyzer.results.profile import Profile

from .column import Column, check_layout
from .data_table import print_data
from .quantity import find_quantity, read_known

#: Of FLOPs those that run, as the first screen has them by phase: with what checkpoints run again.
DEFAULT_COLUMNS = ("params", "peak_allocated_bytes", "hardware_flops", "step_seconds")
_FACTS = (Column("mode", "Mode", "text"), Column("device", "Device", "text"))


def model_table(profiles: Sequence[tuple[str, Profile]], columns: Sequence[str] = DEFAULT_COLUMNS,
                fmt: str = "text") -> str:
    """A row for each name and profile. ``columns`` are quantities of a step, also by path
    (``phases.forward.peak_allocated_bytes``); ``fmt`` is as of `Profile.module_tree`, and in CSV quantities are
    unrounded. Of a step that ran out of memory no more is told than what the model itself has. Raises InputError for an
    unknown column or format.

    >>> small, large = (Profile(name="Net", mode="infer", params=n, peak_allocated_bytes=4 * n) for n in (3, 2048))
    >>> print(model_table([("small", small), ("large", large)], ["params", "peak_allocated_bytes"], fmt="csv"))
    model,mode,device,params,peak_allocated_bytes,out_of_memory
    small,infer,,3,12,False
    large,infer,,2048,8192,False
    """
    check_layout(None, 0, fmt, "model_table()")
    if isinstance(columns, str):
        raise InputError(f"model_table(columns={columns!r}): give names of quantities, as in columns=['params']")
    shown = [find_quantity(name, [profile for _, profile in profiles], "--columns") for name in columns]
    ended = any(profile.out_of_memory is not None for _, profile in profiles)
    told = (Column("out_of_memory", "Out of memory", "text"),) if ended or fmt == "csv" else ()
    rows = [[name, profile.mode, profile.device,
             *(read_known(profile, column.field) for column in shown),
             *([profile.out_of_memory is not None] if told else [])] for name, profile in profiles]
    if fmt != "csv":
        rows = [[*row[:-1], "yes" if row[-1] else "no"] if told else row for row in rows]
    return print_data([Column("model", "Model", "text"), *_FACTS, *shown, *told], rows, fmt)
