"""What an epoch needs whose batches differ in size, as data and as text."""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill

import numpy as np

from analyzer.output import write_output
from analyzer.report.text_table import print_rows
from analyzer.units import format_bytes, format_count, format_percent, format_seconds

from .batching import Cell
from .epoch_memory import EpochStep
from .limit import has_one_size

_SHARES = (50, 90, 99)
_ASSUMED = 6  # sentences that are shown


@dataclass(frozen=True)
class Course:
    """How memory went over the steps, in one way of running them. Bytes; ``failed`` are steps that found no memory,
    ``retries`` those for which the allocator gave its cache back.
    """

    name: str
    peak_allocated: int
    peak_reserved: int
    last_reserved: int
    failed: int
    retries: int
    steps: int

    @classmethod
    def of(cls, name: str, steps: Sequence[EpochStep]) -> Course:
        whole = [step for step in steps if not step.failed] or list(steps)
        return cls(name, max(step.peak_allocated for step in whole), max(step.peak_reserved for step in whole),
                   steps[-1].reserved, sum(step.failed for step in steps), sum(step.retries > 0 for step in steps),
                   len(steps))


@dataclass(frozen=True)
class EpochProfile:
    """What an epoch of batches of different sizes needs. Lists are by step, of those that were simulated: bytes and
    seconds.

    ``courses`` are the epoch as it is, then what helps; ``longest`` is the largest size of a sample with which all
    steps hold, of batches with different numbers of samples the most positions of one; None where none is known.
    ``kinds`` says where steps make other calls.
    """

    name: str
    device: str
    doing: str
    dims: tuple[str, ...]
    lengths: str
    batching: str
    samples: int
    steps: int
    padding_share: float
    capacity_bytes: int | None
    cells: tuple[Cell, ...]
    peak_allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    failed: tuple[bool, ...]
    seconds: tuple[float | None, ...]
    epoch_seconds: float | None
    epoch_range: tuple[float, float] | None
    positions: int
    used_positions: int
    courses: tuple[Course, ...]
    longest: int | None
    kinds: tuple[str, ...]
    profiled: tuple[Cell, ...]
    checked: tuple[Cell, ...]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no step fails as the epoch is."""
        return not any(self.failed)

    def percentile(self, percent: float, what: str = "reserved") -> float:
        """Of the steps, a percentile of ``"reserved"``, ``"peak_allocated"`` or ``"seconds"``."""
        return float(np.percentile([value for value in getattr(self, what) if value is not None], percent))

    def leaving_out(self, part: str) -> EpochProfile:
        """The same without assumptions that name a file."""
        return replace(self, assumptions=tuple([text for text in self.assumptions if part not in text]))

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON, also written to ``path``."""
        text = json.dumps({"format": "analyzer.epoch", "version": 1, **asdict(self)}, indent=1) + "\n"
        if path is not None:
            write_output(path, text)
        return text

    def __str__(self) -> str:
        return describe_epoch(self)


def describe_epoch(found: EpochProfile) -> str:
    """All of it, in forty lines at most."""
    lines = [f"{found.name}: an epoch of {found.steps:,} steps on {found.device} ({found.doing}), {found.samples:,} "
             "samples",
             f"lengths: {found.lengths}", f"{found.batching}: {format_percent(found.padding_share)} is padding", "",
             _list_percentiles(found), "", *_list_growth(found)]
    if found.epoch_seconds is not None:
        ends = "" if found.epoch_range is None else f" ({' to '.join(map(format_seconds, found.epoch_range))})"
        rate = found.positions / found.epoch_seconds
        lines.append(f"an epoch: {format_seconds(found.epoch_seconds)}{ends}, {format_count(rate)} positions a second, "
                     f"{format_count(found.used_positions / found.epoch_seconds)} without padding")
    if len(found.courses) > 1:
        lines += ["", print_rows(("What it gives", "Peak allocated", "Peak reserved", "At the end", "Steps that fail",
                                  "Give back"), [
            (course.name, format_bytes(course.peak_allocated), format_bytes(course.peak_reserved),
             format_bytes(course.last_reserved), format_percent(course.failed / course.steps),
             format_percent(course.retries / course.steps)) for course in found.courses])]
    lines += ["", *_list_limits(found), *_describe_way(found)]
    more = len(found.assumptions) - _ASSUMED
    lines += [f"assumed: {text}" for text in found.assumptions[:_ASSUMED]]
    lines += [f"{more} more assumptions: --json FILE has all"] * (more > 0)
    return "\n".join(fill(line, 120, subsequent_indent="  ") if "\n" not in line else line for line in lines)


def _list_percentiles(found: EpochProfile) -> str:
    rows: list[tuple[str, Sequence[float | None], Callable[[float], str]]] = [
        ("positions", [cell.volume for cell in found.cells], lambda n: f"{n:,.0f}"),
        ("peak allocated", found.peak_allocated, format_bytes), ("reserved", found.reserved, format_bytes),
        ("seconds", found.seconds, format_seconds)]
    table = []
    for name, values, show in rows:
        known = [value for value in values if value is not None]
        if known:
            table.append((name, show(float(np.mean(known))), *(
                show(float(np.percentile(known, share))) for share in _SHARES), show(max(known))))
    return print_rows(("Of a step", "Mean", *(f"p{share}" for share in _SHARES), "Most"), table)


def _list_growth(found: EpochProfile) -> list[str]:
    """Reserved bytes as the epoch goes on, and whether it ends."""
    moments = [moment for moment in (1, 10, 100, 1_000, 10_000) if moment < len(found.reserved)]
    said = [f"{format_bytes(found.reserved[moment - 1])} after {moment:,}" for moment in moments]
    said.append(f"{format_bytes(found.reserved[-1])} after {len(found.reserved):,} steps")
    lines = [f"reserved: {', '.join(said)}"]
    limit = "" if found.capacity_bytes is None else f"; {format_bytes(found.capacity_bytes)} may be reserved"
    count = sum(found.failed)
    first = "" if not count else f", first step {found.failed.index(True) + 1:,} ({_name_cell(found)})"
    lines.append(f"{'fits' if found.fits else 'does NOT fit'}: {count:,} of {len(found.failed):,} steps fail{first}"
                 f"{limit}")
    return lines


def _name_cell(found: EpochProfile) -> str:
    cell = found.cells[found.failed.index(True)]
    return f"{cell.rows} x {' x '.join(f'{size:,}' for size in cell.sizes)}"


def _list_limits(found: EpochProfile) -> list[str]:
    if found.longest is None:
        return ["no length holds"] if not found.fits and len(found.courses) > 1 else []
    rows = max(cell.rows for cell in found.cells)
    if not has_one_size(found.cells):
        return [f"all steps hold with up to {found.longest:,} positions in a batch"]
    return [f"all steps hold up to a {' and '.join(found.dims)} of {found.longest:,}, in batches of {rows}"]


def _describe_way(found: EpochProfile) -> list[str]:
    kinds = "" if not found.kinds else f"; other calls where {', '.join(found.kinds)}"
    return [f"profiled: {len(found.profiled)} steps, of which {len(found.checked)} check the others{kinds}"]
