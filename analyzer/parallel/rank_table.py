"""What each kind of rank of a job costs: peak memory, step and communication, a row a kind. Its views import what draws
them when they are called.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from analyzer.api.result import Profile
from analyzer.errors import ProfileFormatError
from analyzer.output import write_output
from analyzer.record.process_group import format_ranks
from analyzer.saved_format import SavedFormat
from analyzer.units import format_bytes, format_count, format_ends, format_seconds

from .pipeline_timeline import PipelineTimeline
from .rank_row import RankRow

FORMAT = SavedFormat(  #: version 1 did not say its number
    "analyzer.ranks", 2, "table of ranks", "profile the ranks again", {1: dict}, unnumbered=1)
_COLUMNS = ("ranks", "kind", "params", "allocated", "reserved", "host", "peak in", "step", "sent and received")


@dataclass(frozen=True)
class RankTable:
    """A row a kind of rank of a job of ``size`` ranks, which decides memory and time, as plain data. ``timeline`` is
    that of the ranks of a pipeline, None without one. ``profiles`` are those of the ranks that were run, by rank; they
    are not saved. Rows of a pipeline are in the order of its ranks.
    """

    size: int
    rows: tuple[RankRow, ...]
    timeline: PipelineTimeline | None = None
    assumptions: tuple[str, ...] = ()
    profiles: Mapping[int, Profile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def fullest(self) -> RankRow | None:
        """The row whose peak is highest, by bytes allocated; None where one is unknown."""
        peaks = [row.peak_allocated_bytes for row in self.rows]
        known = [peak for peak in peaks if peak is not None]
        return self.rows[peaks.index(max(known))] if known and len(known) == len(peaks) else None

    @property
    def deciding_rank(self) -> int | None:
        """The first rank that ran out of memory, else the one that needs most; None where one's need is unknown."""
        short = next((rank for rank, found in sorted(self.profiles.items()) if found.out_of_memory is not None), None)
        return short if short is not None or self.fullest is None else self.fullest.rank

    @property
    def slowest(self) -> RankRow | None:
        """The row that others wait for; None where a time is unknown."""
        if self.timeline is not None:
            return self.rows[self.timeline.slowest_rank]
        seconds = [row.step_seconds for row in self.rows]
        known = [value for value in seconds if value is not None]
        return self.rows[seconds.index(max(known))] if known and len(known) == len(seconds) else None

    @property
    def step_seconds(self) -> float | None:
        """Of the job: of the pipeline's timeline, else of the slowest rank."""
        if self.timeline is not None:
            return self.timeline.step_seconds
        return None if self.slowest is None else self.slowest.step_seconds

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """Low and high of `step_seconds`, which hold nine of ten measured steps; None where it is not known."""
        if self.timeline is not None:
            return self.timeline.step_seconds_range
        return None if self.slowest is None else self.slowest.step_seconds_range

    def render(self) -> str:
        """The table as text, and which rank decides what."""
        headers, cells = self._list_cells()
        widths = [max(map(len, column)) for column in zip(headers, *cells)]
        lines = ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                           for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
                 for row in [headers, *cells]]
        return "\n".join([*lines, *self._list_said(), *self.assumptions])

    def _list_cells(self) -> tuple[list[str], list[list[str]]]:
        cells = [[format_ranks(row.ranks), row.kind, format_count(row.params), format_bytes(row.peak_allocated_bytes),
                  format_bytes(row.peak_reserved_bytes), format_bytes(row.host_peak_bytes),
                  row.peak_phase or "-", format_seconds(row.step_seconds), format_bytes(row.comm_bytes)]
                 for row in self.rows]
        headers = list(_COLUMNS)
        if all(row.host_peak_bytes is None for row in self.rows):
            return [*headers[:5], *headers[6:]], [[*cell[:5], *cell[6:]] for cell in cells]
        return headers, cells

    def _list_said(self) -> Iterator[str]:
        if self.fullest is not None:
            yield f"most memory: {self.fullest.name}, {format_bytes(self.fullest.peak_allocated_bytes)} allocated"
        if self.slowest is not None:
            known = self.step_seconds_range
            step = format_seconds(self.step_seconds)
            between = f" ({format_ends(step, map(format_seconds, known))})" if known else ""
            yield f"slowest: {self.slowest.name}; the step takes {step}{between}"

    def _repr_html_(self) -> str:
        from analyzer.report.page.document import Headline
        from analyzer.report.page.notebook import fold, write_answer, write_fragment, write_rows

        title, *said = [*self._list_said()] or ["no figure of the ranks is known"]
        assumed = "".join([f"<div>{escape(line)}</div>" for line in self.assumptions])
        return write_fragment(
            f"A job of {self.size} ranks", write_answer(Headline.of(None, title, said)),
            write_rows(*self._list_cells(), left=(0, 1)), fold(f"Assumptions ({len(self.assumptions)})", assumed))

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the job, also written to ``path`` if given. Raises MissingExtraError without plotly."""
        from analyzer.report.page.document import Panel, summary_part, write_page

        from .pipeline_page import describe_rank_memory, describe_ranks, list_rank_parts, pipeline_part, rank_headline

        deciding = next((row for row in self.rows if row.rank == self.deciding_rank), None)
        memory, timeline = describe_rank_memory(self.rows, self.profiles), self.timeline
        lanes = [] if timeline is None else [pipeline_part(timeline.ranks, timeline.actions, timeline.step_seconds,
                                                           [row.name for row in self.rows])]
        parts = [
            rank_headline(self.size, self.rows, deciding, self.slowest, self.step_seconds,
                          self.step_seconds_range, self.profiles),
            Panel("ranks", "Kinds of ranks", describe_ranks(self.rows, self.profiles, deciding, self.slowest)),
            *([Panel("rank_memory", "Memory of each kind", memory)] if memory is not None else []), *lanes,
            summary_part(self.render()),
            *list_rank_parts(self.rows, self.profiles, deciding)]
        return write_page(f"A job of {self.size:,} ranks", parts, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``json.dumps`` takes, without the profiles."""
        data = dataclasses.asdict(dataclasses.replace(self, profiles={}))
        del data["profiles"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankTable:
        """The table that ``to_dict`` gave, also after JSON. Raises ProfileFormatError for anything else."""
        from analyzer.report.export.plain_record import read_plain

        found: RankTable = read_plain(_SavedTable, data).whole
        return found

    def to_json(self, path: str | Path | None = None) -> str:
        """The table and the profiles as JSON text, also written to ``path``; `from_json` reads it."""
        profiles = {str(rank): json.loads(profile.to_json()) for rank, profile in self.profiles.items()}
        text = json.dumps({**FORMAT.head, "table": self.to_dict(), "profiles": profiles})
        if path is not None:
            write_output(Path(path), text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> RankTable:
        """Read what `to_json` wrote, a text or a file. Raises InputError for no file, else ProfileFormatError."""
        from analyzer.report.export.json_format import damage_in, load_text, read_data

        origin, text = load_text(source, "RankTable.from_json", FORMAT.what)
        with damage_in(origin):
            data = FORMAT.read(FORMAT.decode(text))
            given = data.get("profiles")
            if data.keys() != {"table", "profiles"} or not isinstance(given, dict):
                raise ProfileFormatError(f'no table of ranks: expected "table" and the "profiles" by rank, got '
                                         f"{', '.join(map(repr, data))}; give what RankTable.to_json wrote")
            found = cls.from_dict(data["table"])
            for text in given:
                if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < found.size):
                    raise ProfileFormatError(f"profiles[{text!r}]: expected a rank below {found.size}")
            return dataclasses.replace(found, profiles={
                int(rank): read_data(profile, Profile) for rank, profile in given.items()})


@dataclass(frozen=True)
class _SavedTable:
    size: int
    rows: tuple[RankRow, ...]
    timeline: PipelineTimeline | None
    assumptions: tuple[str, ...]

    @property
    def whole(self) -> RankTable:
        """The table. Raises ProfileFormatError where rows and timeline are not of the same ranks."""
        ranks = [rank for row in self.rows for rank in (row.rank, *[run.last for run in row.runs])]
        if ranks and max(ranks) >= self.size:
            raise ProfileFormatError(f"rows: {len(self.rows)} rows of ranks {ranks[:8]}, of {self.size} ranks")
        if self.timeline is not None and (
                not self.rows or [rank.rank for rank in self.timeline.ranks] != [*range(len(self.rows))]):
            raise ProfileFormatError(f"timeline: has {len(self.timeline.ranks)} ranks, and there are {len(self.rows)} "
                                     "rows")
        return RankTable(self.size, self.rows, self.timeline, self.assumptions)
