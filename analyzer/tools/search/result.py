"""What a search found: the ranked table, the Pareto front, the best layout in detail; text, page, JSON, DataFrame, each
of which imports what draws it when it is called.
"""
from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.output import write_output
from analyzer.results.run_cost import SECONDS_PER_HOUR
from analyzer.units import format_bytes, format_count, format_ends, format_percent, format_seconds

from .compose import JobStep
from .layout import Layout

if TYPE_CHECKING:
    import pandas

    from analyzer.report.page.document import Panel

_DAY = 24 * SECONDS_PER_HOUR
_WIDTH = 120


@dataclass(frozen=True)
class LayoutChange:
    """Something that would help: by what factor tokens a second grow, and the layout then."""

    name: str
    gain: float
    layout: Layout


@dataclass(frozen=True)
class SearchResult:
    """The ``best`` layouts, the fastest first; where nothing ``fits`` those that lack the least memory. ``composed``
    are all whose steps are known, ``counts`` how many layouts there were and why others were left out, ``failed`` how
    many raised which error. ``changes`` would help the best one; ``neighbors`` are the best steps of other numbers of
    devices. ``profiles`` is how many ranks were profiled.
    """

    name: str
    devices: int
    devices_per_host: int
    cluster: str
    device: str
    capacity_bytes: int | None
    global_batch: int
    sequence: int
    tokens: int | None
    price: float | None
    steps: tuple[JobStep, ...]
    composed: tuple[JobStep, ...]
    fits: bool
    changes: tuple[LayoutChange, ...]
    neighbors: tuple[tuple[int, JobStep | None], ...]
    counts: Mapping[str, int]
    failed: Mapping[str, int]
    profiles: int
    assumptions: tuple[str, ...]

    @property
    def best(self) -> JobStep:
        """The fastest step that fits; where none does, the one that lacks the least memory."""
        return self.steps[0]

    def tokens_per_second(self, step: JobStep) -> float:
        """Of all devices together."""
        return step.layout.global_batch * self.sequence / step.step_seconds

    def free_bytes(self, step: JobStep) -> int | None:
        """What is left of a device's memory; negative where a step lacks some."""
        return None if self.capacity_bytes is None else self.capacity_bytes - step.needed_bytes

    def days(self, step: JobStep) -> float | None:
        """Of the whole run."""
        return None if self.tokens is None else self.tokens / self.tokens_per_second(step) / _DAY

    def dollars(self, step: JobStep) -> float | None:
        """Of the whole run."""
        days = self.days(step)
        if days is None or self.price is None:
            return None
        return days * _DAY / SECONDS_PER_HOUR * step.layout.devices * self.price

    @property
    def pareto(self) -> tuple[JobStep, ...]:
        """Of all composed steps those than which none is both faster and smaller, the fastest first."""
        found: list[JobStep] = []
        for step in sorted(self.composed, key=lambda s: (s.step_seconds, s.needed_bytes, s.layout)):
            if not found or step.needed_bytes < found[-1].needed_bytes:
                found.append(step)
        return tuple(found)

    def rows(self, steps: Sequence[JobStep] | None = None) -> list[dict[str, Any]]:
        """A row of plain numbers for each of the ranked steps, or of those given."""
        found = []
        for step in self.steps if steps is None else steps:
            free, (low, high) = self.free_bytes(step), step.step_seconds_range or (None, None)
            found.append({**asdict(step.layout), "layout": str(step.layout), "devices": step.layout.devices,
                          "needed_bytes": step.needed_bytes, "free_bytes": free,
                          "fits": None if free is None else free >= 0, "peak_allocated_bytes": step.peak_bytes,
                          "step_seconds": step.step_seconds, "step_seconds_low": low, "step_seconds_high": high,
                          "bound": step.bound, "mfu": step.mfu, "tokens_per_second": self.tokens_per_second(step),
                          "days": self.days(step), "dollars": self.dollars(step)})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``json.dumps`` takes."""
        return {"model": self.name, "devices": self.devices, "cluster": self.cluster, "device": self.device,
                "capacity_bytes": self.capacity_bytes, "global_batch": self.global_batch, "sequence": self.sequence,
                "tokens": self.tokens, "price": self.price, "fits": self.fits, "layouts": self.rows(),
                "pareto": self.rows(self.pareto), "stages": [asdict(stage) for stage in self.best.stages],
                "changes": [asdict(change) for change in self.changes],
                "neighbors": [{"devices": devices, "best": None if step is None else self.rows([step])[0]}
                              for devices, step in self.neighbors],
                "counts": dict(self.counts), "failed": dict(self.failed), "profiles": self.profiles,
                "assumptions": list(self.assumptions)}

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_output(Path(path), text)
        return text

    def to_dataframe(self) -> pandas.DataFrame:
        """The rows of all composed steps. Raises MissingExtraError without pandas."""
        from analyzer.report.export.table_file import import_pandas

        return import_pandas().DataFrame(self.rows(self.composed))

    def table(self, steps: Sequence[JobStep] | None = None, fmt: str = "text") -> str:
        """The ranked layouts, a row each."""
        from analyzer.report.text_table import print_rows

        headers = ["", "Layout", "Needed", "Free", "Step", "Bound", "MFU", "Tokens/s", "Days", "Cost"]
        rows = []
        for i, step in enumerate(self.steps if steps is None else steps, 1):
            ends, days, dollars = step.step_seconds_range, self.days(step), self.dollars(step)
            seconds = format_seconds(step.step_seconds)
            seconds += "" if ends is None else f" ({format_ends(seconds, map(format_seconds, ends))})"
            speed = format_count(round(self.tokens_per_second(step)))
            rows.append([str(i), str(step.layout), format_bytes(step.needed_bytes), format_bytes(self.free_bytes(step)),
                         seconds, step.bound, format_percent(step.mfu), speed, f"{days:.2f}" if days else "",
                         f"${dollars:,.0f}" if dollars else ""])
        width = 8 if self.tokens is None else 9 if self.price is None else 10
        return print_rows(headers[:width], [row[:width] for row in rows], left=(1, 5), fmt=fmt)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (f"{self.name} on {self.devices:,} {self.device}: steps of {self.global_batch:,} samples of "
               f"{self.sequence:,} tokens")
        yield "" if self.fits else "nothing fits; of these layouts the least memory is missing:"
        yield self.table()
        yield "N x M in a layout: of each rank N micro-batches a step, of M samples each"
        counts = dict(self.counts)
        layouts, composed = counts.pop("layouts"), counts.pop("composed")
        left = ", ".join(f"of {n:,} {why}" for why, n in counts.items() if n)
        yield from _wrap(f"{layouts:,} layouts; the steps of {composed:,} were composed of {self.profiles:,} profiled "
                         f"ranks" + (f"; {left}" if left else ""))
        for error, number in self.failed.items():
            yield from _wrap(f"{number:,} layouts failed: {error}")
        yield ""
        yield f"best: {self.best.layout}"
        yield self.stage_table()
        if self.best.timeline is not None:
            yield self.best.timeline.render(_WIDTH)
        yield from self._advice()
        yield from (line for text in self.assumptions for line in _wrap(f"- {text}"))

    def _advice(self) -> Iterator[str]:
        pareto = self.pareto
        if len(pareto) > 1:
            lacking = sum((self.free_bytes(step) or 0) < 0 for step in pareto)
            told = f", of which the first {lacking} do not fit" if lacking > 1 else (
                ", of which the first does not fit" if lacking else "")
            yield f"\nless memory for more time (Pareto front of the composed steps{told}):"
            yield self.table(pareto)
        if self.changes:
            yield "\nwhat would help most:"
            for change in self.changes:
                yield from _wrap(f"- {change.name}: {change.gain:.2f} times the tokens a second ({change.layout})")
        for devices, step in self.neighbors:
            if step is None:
                yield f"on {devices:,} devices nothing fits"
            else:
                yield from _wrap(f"on {devices:,} devices: {format_seconds(step.step_seconds)} a step, "
                                 f"{format_percent(step.mfu)} MFU ({step.layout})")

    def stage_table(self) -> str:
        """Memory and time of the ranks of the best layout, those that are alike in one row."""
        from analyzer.report.text_table import print_rows

        rows: list[list[str]] = []
        for figures, alike in groupby(self.best.stages, key=lambda stage: replace(stage, rank=0)):
            ranks = [stage.rank for stage in alike]
            rows.append([str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}", str(figures.part.blocks),
                         format_count(figures.params), str(figures.in_flight), format_bytes(figures.peak_bytes),
                         format_bytes(figures.update_peak_bytes), format_seconds(figures.forward_seconds),
                         format_seconds(figures.backward_seconds), format_seconds(figures.optimizer_seconds)])
        headers = ["Rank", "Blocks", "Params", "In flight", "Peak of passes", "Of update", "Forward", "Backward",
                   "Update"]
        return print_rows(headers, rows)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page, also written to ``path``: memory and time of all composed layouts, the best one's schedule, all as
        text. Raises MissingExtraError without plotly.
        """
        from analyzer.parallel.pipeline_page import pipeline_part
        from analyzer.report.page.document import Headline, Tile, headline_part, summary_part, write_page

        best = self.best
        tiles = [Tile("Step", format_seconds(best.step_seconds), str(best.layout)),
                 Tile("MFU", format_percent(best.mfu), f"bound: {best.bound}"),
                 Tile("Needed", format_bytes(best.needed_bytes), f"of {format_bytes(self.capacity_bytes)}"),
                 Tile("Tokens a second", f"{self.tokens_per_second(best):,.0f}", f"{self.devices:,} devices")]
        said = f"{best.layout} is the fastest that fits" if self.fits else "nothing fits"
        parts = [headline_part(Headline.of(self.fits, said), tiles), self._sweep_part()]
        if best.timeline is not None:
            line = best.timeline
            parts.append(pipeline_part(line.ranks, line.actions, line.step_seconds))
        parts.append(summary_part(str(self)))
        return write_page(f"Layouts of {self.name} on {self.devices:,} {self.device}", parts, path)

    def _sweep_part(self) -> Panel:
        from analyzer.report.page.document import Panel
        from analyzer.tools.sweep.result import list_dimensions, list_fits

        rows = self.rows(self.composed)
        quantities = [{"title": title, "unit": unit, "more": more, "values": [row[name] for row in rows]}
                      for title, unit, name, more in (("Needed", "bytes", "needed_bytes", False),
                                                      ("Step", "seconds", "step_seconds", False),
                                                      ("MFU", "share", "mfu", True))]
        return Panel("sweep", "Layouts", {
            "dimensions": list_dimensions(rows, ("sharding", "tensor", "context", "pipeline", "schedule", "micro_batch",
                                                 "checkpointing")),
            "fits": list_fits(rows), "quantities": quantities, "x": "Needed", "y": "Step"})


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
