"""A run's log in words and beside a prediction."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import fill

from analyzer.api.result import Profile
from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean, cut_middle
from analyzer.units import format_bytes, format_count, format_ends, format_percent, format_rate, format_seconds

from ..prediction import Prediction
from .run_log import QUANTITIES, RunLog
from .run_series import SteadyPart, find_steady

_NAMES = {"step_seconds": "time of a step", "tokens_per_second": "tokens a second",
          "device_tokens_per_second": "tokens a second, of a device", "samples_per_second": "samples a second",
          "device_samples_per_second": "samples a second, of a device", "flops_per_second": "FLOPs a second",
          "mfu": "MFU", "allocated_bytes": "memory allocated", "active_bytes": "memory active",
          "reserved_bytes": "memory reserved", "used_bytes": "memory of the device in use"}
_FORMATS: dict[str, Callable[[float | None], str]] = {
    "s": format_seconds, "/s": format_count, "FLOPs/s": lambda rate: format_rate(rate, "FLOP"), "share": format_percent,
    "B": format_bytes}
_ROWS = 14       # of the table
_OUTLIERS = 4    # that are named
_TOLD = ("step_seconds", "device_tokens_per_second", "tokens_per_second", "used_bytes", "reserved_bytes")


@dataclass(frozen=True)
class LoggedQuantity:
    """One quantity of a run, and the same of the prediction, None where that has none."""

    name: str
    run: float                #: the steady median of a series, of memory its most; else the figure of the whole run
    steady: SteadyPart | None
    predicted: float | None = None
    predicted_range: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """The run's by the predicted one."""
        return self.run / self.predicted if self.predicted else None


def list_quantities(log: RunLog, profile: Profile | None) -> list[LoggedQuantity]:
    """What the log tells, those first that a prediction has too."""
    predicted = {} if profile is None else _list_predicted(profile)
    rows = []
    for name in [*QUANTITIES, *(name for name in log.series if name not in QUANTITIES)]:
        values, figure = log.series.get(name), log.figures.get(name)
        if not values and figure is None:
            continue
        steady = find_steady(values, log.resolution.get(name, 0.0)) if values else None
        is_memory = QUANTITIES.get(name) == "B"
        # Memory must suffice at its most; of a time and a speed the steady part is what a prediction is of.
        run = (figure if steady is None or figure is not None and is_memory else
               steady.most if is_memory else steady.median)
        assert run is not None
        rows.append(LoggedQuantity(name, run, steady, *predicted.get(name, (None, None))))
    return rows


def _list_predicted(profile: Profile) -> dict[str, tuple[float | None, tuple[float, float] | None]]:
    copies = profile.data_parallel_size
    devices = None if copies is None else copies * (profile.model_parallel_size or 1)
    tokens, samples = profile.tokens_per_second, profile.samples_per_second
    needed = None if profile.verdict is None else profile.verdict.needed_bytes
    return {
        "step_seconds": (profile.step_seconds, profile.step_seconds_range),
        "tokens_per_second": (tokens, None), "samples_per_second": (samples, None),
        "device_tokens_per_second": (None if tokens is None or devices is None else tokens / devices, None),
        "device_samples_per_second": (None if samples is None or devices is None else samples / devices, None),
        "flops_per_second": (profile.model_flops_per_second, None),
        "allocated_bytes": (profile.peak_allocated_bytes, profile.peak_allocated_bytes_range),
        "active_bytes": (profile.peak_allocated_bytes, profile.peak_allocated_bytes_range),
        "reserved_bytes": (profile.peak_reserved_bytes, profile.peak_reserved_bytes_range),
        "used_bytes": (needed, None)}


def describe_run(name: str, log: RunLog, rows: list[LoggedQuantity], prediction: Prediction | None) -> str:
    """The run in a table, what is not steady in sentences, and what the log does not tell."""
    head = f"{clean(name)}: log of a run, by {log.program}"
    head += "" if log.steps is None else f", {log.steps:,} steps"
    head += "" if log.runtime_seconds is None else f" in {format_seconds(log.runtime_seconds)}"
    head += "" if len(log.ranks) < 2 else f", of {len(log.ranks)} ranks (times of rank {log.ranks[0]})"
    parts = [fill(head, 120)]
    if prediction is not None:
        parts[0] += "\n" + fill(f"against {clean(prediction.name)} on {clean(prediction.device)}", 120)
    table = [_row(row, prediction is not None) for row in rows[:_ROWS]]
    headers = ["Quantity", "Values", "Run", "Middle half"]
    headers += ["Predicted", "Range", "Ratio"] if prediction is not None else ["Least to most"]
    parts.append(print_rows(headers, table, left=(0,)))
    said = [sentence for row in rows if row.name in _TOLD and row.steady is not None
            for sentence in _say(row, row.steady)]
    if prediction is not None:
        said += _judge(rows)
    said += [clean(note) for note in log.notes]
    if len(rows) > _ROWS:
        said.append(f"{len(rows) - _ROWS} more columns are in --json")
    if said:
        parts.append("\n".join(fill(sentence, 120, subsequent_indent="  ") for sentence in said))
    if log.unknown:
        parts.append("\n".join(fill(f"not in the log: {clean(what)}", 120, subsequent_indent="  ")
                               for what in log.unknown))
    return "\n\n".join(parts)


def _format(name: str, value: float | None) -> str:
    unit = QUANTITIES.get(name)
    return f"{value:,.10g}" if unit is None and value is not None else _FORMATS[unit or "/s"](value)


def _format_range(name: str, low: float, high: float) -> str:
    return format_ends(_format(name, low), (_format(name, low), _format(name, high)))


def _row(row: LoggedQuantity, is_against: bool) -> list[str]:
    steady = row.steady
    is_memory = QUANTITIES.get(row.name) == "B"
    name = _NAMES.get(row.name, cut_middle(clean(row.name), 40)) + (
        ", most" if is_memory else ", mean of the run" if steady is None else "")
    cells = [name, f"{1 if steady is None else steady.count:,}", _format(row.name, row.run),
             "" if steady is None else _format_range(row.name, steady.low, steady.high)]
    if not is_against:
        return [*cells, "" if steady is None else _format_range(row.name, steady.least, steady.most)]
    ends = row.predicted_range
    return [*cells, _format(row.name, row.predicted), "" if ends is None else _format_range(row.name, *ends),
            "-" if row.ratio is None else f"{row.ratio:.2f}"]


def _say(row: LoggedQuantity, steady: SteadyPart) -> list[str]:
    name, said = _NAMES[row.name], []
    is_memory = QUANTITIES[row.name] == "B"
    if steady.warm_up and not is_memory:
        said.append(f"{name}: warm-up, {_count(steady.warm_up, 'first value')} at "
                    f"{_format(row.name, steady.warm_up_median)}, left out of the figures")
    if steady.outliers and not is_memory:
        named = ", ".join(f"{_format(row.name, value)}" + ("" if step is None else f" until step {step:,}")
                          for step, value in steady.outliers[:_OUTLIERS])
        more = len(steady.outliers) - _OUTLIERS
        said.append(f"{name}: {_count(len(steady.outliers), 'outlier')}: {named}"
                    + (f" and {more} more" if more > 0 else ""))
    if steady.drift is not None:
        said.append(f"{name}: drifts, its last third is {steady.drift:.2f} times its first one")
    return said


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number > 1)}"


def _judge(rows: list[LoggedQuantity]) -> list[str]:
    """Whether what was logged is within the range of the prediction."""
    said = []
    for row in rows:
        if row.predicted_range is None:
            continue
        low, high = row.predicted_range
        if low <= row.run <= high:
            said.append(f"{_NAMES[row.name]}: within the predicted range")
        else:
            side, bound = ("above", high) if row.run > high else ("below", low)
            said.append(f"{_NAMES[row.name]}: {side} the predicted range, {row.run / bound:.2f} times its end")
    if not any(row.predicted for row in rows):
        said.append("nothing that the log tells is predicted")
    return said
