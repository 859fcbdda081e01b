"""Ranks and pipelines as pages and charts."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analyzer.api.result import Profile
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.record.process_group import format_ranks
from analyzer.report.holder_group import sum_exposed
from analyzer.report.page.document import (
    Headline,
    Panel,
    Tile,
    capitalize_first,
    choice_part,
    columns_of,
    headline_part,
    pack,
)
from analyzer.report.page.part import sort_categories, thin_out
from analyzer.report.page.profile_page import list_parts
from analyzer.units import format_bytes, format_count, format_percent, format_seconds

from .pipeline_schedule import COMPUTE_KINDS, TRANSFER_KINDS, RankTime, StageAction
from .rank_row import RankRow

_LEGEND = ("0-9 forward, a-j backward of a micro-batch (its last digit; a is 0), w weight gradient, + gradients and "
           "what stages share, = update, . waiting")
_MARKS = {"forward": "0123456789", "backward": "abcdefghij", "backward_input": "abcdefghij", "backward_weight": "w",
          "optimizer": "=", "reduce_grad": "+", "shared": "+", "unshard": "+"}
_COLUMNS = ("rank", "stages", "compute", "update", "transfers", "collectives", "bubble", "share", "warm-up")


def draw_bars(ranks: Sequence[RankTime], actions: Sequence[StageAction], step_seconds: float, width: int) -> list[str]:
    """A bar a rank, of at most ``width`` columns, and what its marks mean."""
    label = len(str(len(ranks) - 1))
    columns = max(10, width - len("rank  ") - label)
    column = step_seconds / columns or 1.0
    bars = []
    for rank in ranks:
        shown = [(1e-6 * column, ".")] * columns  # what rounding leaves of a neighbour is not shown
        for action in actions:
            if action.rank != rank.rank or action.kind not in _MARKS:
                continue
            marks = _MARKS[action.kind]
            for i in range(int(action.start / column), min(columns, int(action.end / column) + 1)):
                share = min(action.end, (i + 1) * column) - max(action.start, i * column)
                if share > shown[i][0]:  # a column shows what takes most of it
                    shown[i] = share, marks[(action.micro_batch or 0) % len(marks)]
        bars.append(f"rank {rank.rank:>{label}} " + "".join(mark for _, mark in shown))
    return [*bars, *textwrap.wrap(_LEGEND, width)]


def list_seconds(ranks: Sequence[RankTime], step_seconds: float) -> list[str]:
    rows = [[str(rank.rank), ",".join(map(str, rank.stages)), *(format_seconds(seconds) for seconds in (
        rank.compute_seconds, rank.optimizer_seconds, rank.exposed_transfer_seconds, rank.exposed_group_seconds,
        rank.bubble_seconds)), format_percent(rank.bubble_seconds / step_seconds if step_seconds else None),
        format_seconds(rank.warmup_seconds)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [list(_COLUMNS), *rows]]


WAIT = "wait"
_MOST_ACTIONS = 100_000  # of more, transfers are left out: a file must open within seconds
_SPAN_FIELDS = ("rank", "kind", "stage", "micro_batch", "peer")
_SECONDS = ("compute_seconds", "optimizer_seconds", "exposed_transfer_seconds", "exposed_group_seconds",
            "bubble_seconds", "warmup_seconds")


def pipeline_part(ranks: Sequence[RankTime], actions: Sequence[StageAction], step_seconds: float,
                  names: Sequence[str] | None = None) -> Panel:
    """The lanes of a pipeline's ranks, by default with their numbers there, and what each spends its step on."""
    if names is None:
        names = [f"rank {rank.rank}: stage {', '.join(map(str, rank.stages))}" for rank in ranks]
    shown = [a for a in actions if a.end > a.start]
    leaves_out = len(shown) > _MOST_ACTIONS
    if leaves_out:
        shown = [a for a in shown if a.kind not in TRANSFER_KINDS]
    spans = [*shown, *(wait for rank in ranks for wait in _list_waits(rank.rank, actions, step_seconds))]
    # a rank is warming up until its first backward pass begins, and cooling down from its last forward pass on
    last_forward = {a.rank: a.end for a in actions if a.kind == "forward"}  # each rank's are in its order
    cooldown = [max(0.0, step_seconds - max(rank.warmup_seconds, last_forward.get(rank.rank, 0.0))) for rank in ranks]
    return Panel("pipeline", "Schedule of the pipeline", {
        "step_seconds": step_seconds, "leaves_out_transfers": leaves_out, "names": list(names),
        "spans": {**columns_of(spans, _SPAN_FIELDS), "start": [round(a.start * PICOSECONDS) for a in spans],
                  "end": [round(a.end * PICOSECONDS) for a in spans]},
        "ranks": {"rank": [rank.rank for rank in ranks],
                  "stages": [", ".join(map(str, rank.stages)) for rank in ranks], **columns_of(ranks, _SECONDS),
                  "steady_seconds": [max(0.0, step_seconds - rank.warmup_seconds - cool)
                                     for rank, cool in zip(ranks, cooldown)],
                  "cooldown_seconds": cooldown}})


def pipeline_headline(step_seconds: float, step_range: tuple[float, float] | None, micro_batches: int,
                      ranks: Sequence[RankTime], shares: tuple[float, float], imbalance: float, slowest: int) -> Panel:
    """What a page of a timeline says first; ``shares`` are those of the bubble and of exposed transfers."""
    bubble, transfers = shares
    between = f"{format_seconds(step_range[0])} to {format_seconds(step_range[1])}" if step_range else ""
    tiles = [Tile("Step time", format_seconds(step_seconds), between, "Nine in ten measured steps lie between."),
             Tile("Bubble", format_percent(bubble), "", "Share of the step in which ranks have nothing to do."),
             Tile("Exposed transfers", format_percent(transfers), "", "Share in which ranks only wait for a transfer."),
             Tile("Imbalance", f"{imbalance:.2f}", f"slowest rank {slowest}",
                  "The longest time that a rank computes, divided by the mean of all."),
             Tile("Micro-batches", str(micro_batches)), Tile("Ranks", str(len(ranks)))]
    said = f"one step of {len(ranks)} ranks takes {format_seconds(step_seconds)}, {format_percent(bubble)} of it bubble"
    return headline_part(Headline.of(None, said), tiles)


def _list_waits(rank: int, actions: Sequence[StageAction], step_seconds: float) -> Iterator[StageAction]:
    free = 0.0
    for action in (a for a in actions if a.rank == rank and a.kind in COMPUTE_KINDS):
        if action.start > free:
            yield StageAction(rank, WAIT, action.stage, None, free, action.start)
        free = max(free, action.end)
    if step_seconds > free:
        yield StageAction(rank, WAIT, -1, None, free, step_seconds)


_MOST_POINTS = 20_000  # of all curves together
_MOST_PACKED = 4_500_000  # bytes of the ranks' own parts: with what draws the charts a file stays below 10 MB
#: What bars and table show: title, unit, and the field of a row.
_QUANTITIES = (("Peak reserved", "bytes", "peak_reserved_bytes"), ("Host peak", "bytes", "host_peak_bytes"),
               ("Step", "seconds", "step_seconds"), ("Sent and received", "bytes", "comm_bytes"),
               ("Parameters", "count", "params"), ("Parameter size", "bytes", "param_bytes"),
               ("Optimizer states", "bytes", "optimizer_bytes"))


def rank_headline(size: int, rows: Sequence[RankRow], deciding: RankRow | None, slowest: RankRow | None,
                  step_seconds: float | None, step_range: tuple[float, float] | None,
                  profiles: Mapping[int, Profile]) -> Panel:
    """What a page of ranks says first; ``step_range`` is low and high of the job's step."""
    verdict = None if deciding is None or deciding.rank not in profiles else profiles[deciding.rank].verdict
    said = [f"which of {size} ranks needs most memory is not known"]
    tiles = [Tile("Ranks", format_count(size), f"{len(rows)} kind{'s' if len(rows) > 1 else ''} in the table")]
    if deciding is not None:
        allocated = format_bytes(deciding.peak_allocated_bytes)
        said = [f"{allocated} allocated"] if verdict is None else str(verdict).splitlines()
        said[0] = f"{deciding.name} decides: {said[0]}"
        tiles.append(Tile("Most allocated", allocated, f"{format_bytes(deciding.peak_reserved_bytes)} reserved",
                          f"On {deciding.name}."))
    if step_seconds is not None:
        tiles.append(Tile("Step of the job", format_seconds(step_seconds),
                          "" if slowest is None else f"slowest rank {slowest.rank}",
                          "" if step_range is None else "Nine in ten measured steps take "
                          f"{format_seconds(step_range[0])} to {format_seconds(step_range[1])}."))
    exposed = [seconds for profile in profiles.values() if (seconds := sum_exposed(profile)) is not None]
    if any(exposed):
        tiles.append(Tile("Exposed communication", format_seconds(max(exposed)), "at most, of a rank"))
    return headline_part(Headline.of(None if verdict is None else verdict.fits, said[0], said[1:]), tiles)


def describe_ranks(rows: Sequence[RankRow], profiles: Mapping[int, Profile], deciding: RankRow | None,
                   slowest: RankRow | None) -> dict[str, Any]:
    """The kinds of ranks by column; ``categories`` add up to the peaks, and are not there where one is not known."""
    known = [profiles.get(row.rank) for row in rows]
    parts = [{} if profile is None else profile.peak_by_category for profile in known]
    names = sort_categories(name for part in parts for name in part)
    adds_up = all(sum(part.values()) == row.peak_allocated_bytes for part, row in zip(parts, rows))
    exposed = [None if profile is None else sum_exposed(profile) for profile in known]
    quantities = [("Peak allocated", "bytes", [row.peak_allocated_bytes for row in rows]),
                  *((title, unit, [getattr(row, field) for row in rows]) for title, unit, field in _QUANTITIES),
                  ("Exposed communication", "seconds", exposed)]
    verdict = None if deciding is None or deciding.rank not in profiles else profiles[deciding.rank].verdict
    return {"ranks": [format_ranks(row.ranks) for row in rows], "kind": [row.kind for row in rows],
            "alike": [len(row.ranks) for row in rows], "peak_phase": [row.peak_phase for row in rows],
            "quantities": [{"title": title, "unit": unit, "values": values} for title, unit, values in quantities
                           if any(value is not None for value in values)],
            "categories": {name: [part.get(name, 0) for part in parts] for name in names} if adds_up else {},
            "deciding": None if deciding is None else rows.index(deciding),
            "slowest": None if slowest is None else rows.index(slowest),
            "device": None if verdict is None else verdict.device,
            "capacity": None if verdict is None else verdict.capacity_bytes}


def describe_rank_memory(rows: Sequence[RankRow], profiles: Mapping[int, Profile]) -> dict[str, Any] | None:
    """What each kind of rank has allocated over its step, thinned out to the highest moments; None where unknown."""
    known = [(row, profiles[row.rank].timeline) for row in rows if row.rank in profiles]
    known = [(row, timeline) for row, timeline in known if timeline]
    curves: list[dict[str, Any]] = []
    for row, timeline in known:
        points = thin_out(timeline, max(200, _MOST_POINTS // len(known)))
        phases, labels = ([dict.fromkeys(texts) for texts in ([p.phase or "" for p in points],
                                                              [str(p.label) for p in points])])
        places = [{text: i for i, text in enumerate(texts)} for texts in (phases, labels)]
        curves.append({
            "name": row.name, "phases": list(phases), "labels": list(labels),
            "phase": [places[0][p.phase or ""] for p in points], "label": [places[1][str(p.label)] for p in points],
            "allocated": [p.allocated_bytes for p in points], "seconds": [p.seconds for p in points]})
    return {"curves": curves} if curves else None


def list_rank_parts(rows: Sequence[RankRow], profiles: Mapping[int, Profile], deciding: RankRow | None) -> list[Panel]:
    """The parts of the ranks' own pages, of as many as keep the file small, the rank that decides first."""
    ordered = [row for row in sorted(rows, key=lambda row: row != deciding) if row.rank in profiles]
    groups: dict[str, list[Panel]] = {}
    packed = 0
    for row in ordered:
        parts = list(list_parts(profiles[row.rank]))
        packed += len(pack([dict(part.data) for part in parts])) + sum(len(part.lead) for part in parts)
        if groups and packed > _MOST_PACKED:
            break
        titled = [replace(part, title=capitalize_first(row.name)) if part.kind == "verdict" else part for part in parts]
        groups[row.name] = [replace(part, group=row.name) for part in titled]
    missing = len(ordered) - len(groups)
    note = f"{missing} more would make the file too large; their figures are in the table." if missing else ""
    choice = [choice_part("A rank by itself", list(groups), note)] if len(ordered) > 1 else []
    return [*choice, *(part for parts in groups.values() for part in parts)]
