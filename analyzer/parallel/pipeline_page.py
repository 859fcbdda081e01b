"""A pipeline's timeline as parts of a page."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from analyzer.profilers.schedule import PICOSECONDS
from analyzer.report.page.answer import Headline, Tile
from analyzer.report.page.document import Part, columns_of
from analyzer.report.page.headline import headline_part
from analyzer.units import format_percent, format_seconds

from .pipeline_action import COMPUTE_KINDS, TRANSFER_KINDS
from .stage_action import RankTime, StageAction

WAIT = "wait"
_MOST_ACTIONS = 100_000  # of more, transfers are left out: a file must open within seconds
_SPAN_FIELDS = ("rank", "kind", "stage", "micro_batch", "peer")
_SECONDS = ("compute_seconds", "optimizer_seconds", "exposed_transfer_seconds", "exposed_group_seconds",
            "bubble_seconds", "warmup_seconds")


def pipeline_part(ranks: Sequence[RankTime], actions: Sequence[StageAction], step_seconds: float,
                  names: Sequence[str] | None = None) -> Part:
    """The lanes of a pipeline's ranks, and what each spends its step on. ``names`` are those of the ranks in the job;
    by default they are numbered as in the pipeline.
    """
    if names is None:
        names = [f"rank {rank.rank}: stage {', '.join(map(str, rank.stages))}" for rank in ranks]
    data = describe_pipeline(ranks, actions, step_seconds)
    return Part("pipeline", "Schedule of the pipeline", {**data, "names": list(names)})


def pipeline_headline(step_seconds: float, step_range: tuple[float, float] | None, micro_batches: int,
                      ranks: Sequence[RankTime], shares: tuple[float, float], imbalance: float, slowest: int) -> Part:
    """What a page of a timeline says first; ``shares`` are those of the bubble and of exposed transfers."""
    bubble, transfers = shares
    between = f"{format_seconds(step_range[0])} to {format_seconds(step_range[1])}" if step_range else ""
    tiles = [Tile("Step time", format_seconds(step_seconds), between, "Nine in ten measured steps lie between."),
             Tile("Bubble", format_percent(bubble), "", "Ranks have nothing to do, as a part of the step."),
             Tile("Exposed transfers", format_percent(transfers), "", "Ranks only wait for a transfer."),
             Tile("Imbalance", f"{imbalance:.2f}", f"slowest rank {slowest}",
                  "The most that a rank computes over what ranks compute on average."),
             Tile("Micro-batches", str(micro_batches)), Tile("Ranks", str(len(ranks)))]
    said = f"one step of {len(ranks)} ranks takes {format_seconds(step_seconds)}, {format_percent(bubble)} of it bubble"
    return headline_part(Headline.of(None, said), tiles)


def describe_pipeline(ranks: Sequence[RankTime], actions: Sequence[StageAction], step_seconds: float) -> dict[str, Any]:
    """What each rank does when, its waits among them, in picoseconds of the step; and its seconds by what they are
    spent on. A rank is warming up until its first backward pass begins, and cooling down from its last forward pass on.
    """
    shown = [a for a in actions if a.end > a.start]
    leaves_out = len(shown) > _MOST_ACTIONS
    if leaves_out:
        shown = [a for a in shown if a.kind not in TRANSFER_KINDS]
    spans = [*shown, *(wait for rank in ranks for wait in _list_waits(rank.rank, actions, step_seconds))]
    last_forward = {a.rank: a.end for a in actions if a.kind == "forward"}  # each rank's are in its order
    cooldown = [max(0.0, step_seconds - max(rank.warmup_seconds, last_forward.get(rank.rank, 0.0))) for rank in ranks]
    return {"step_seconds": step_seconds, "leaves_out_transfers": leaves_out,
            "spans": {**columns_of(spans, _SPAN_FIELDS), "start": [round(a.start * PICOSECONDS) for a in spans],
                      "end": [round(a.end * PICOSECONDS) for a in spans]},
            "ranks": {"rank": [rank.rank for rank in ranks],
                      "stages": [", ".join(map(str, rank.stages)) for rank in ranks], **columns_of(ranks, _SECONDS),
                      "steady_seconds": [max(0.0, step_seconds - rank.warmup_seconds - cool)
                                         for rank, cool in zip(ranks, cooldown)],
                      "cooldown_seconds": cooldown}}


def _list_waits(rank: int, actions: Sequence[StageAction], step_seconds: float) -> Iterator[StageAction]:
    """The gaps between what a rank computes."""
    free = 0.0
    for action in (a for a in actions if a.rank == rank and a.kind in COMPUTE_KINDS):
        if action.start > free:
            yield StageAction(rank, WAIT, action.stage, None, free, action.start)
        free = max(free, action.end)
    if step_seconds > free:
        yield StageAction(rank, WAIT, -1, None, free, step_seconds)
