"""A pipeline's timeline as text."""
from __future__ import annotations

import textwrap
from collections.abc import Sequence

from analyzer.units import format_percent, format_seconds

from .stage_action import RankTime, StageAction

_LEGEND = ("0-9 forward, a-j backward of a micro-batch (its last digit; a is 0), w weight gradient, + gradients and "
           "what stages share, = update, . waiting")
_COLUMNS = ("rank", "stages", "compute", "update", "transfers", "collectives", "bubble", "share", "warm-up")


def draw_bars(ranks: Sequence[RankTime], actions: Sequence[StageAction], step_seconds: float, width: int) -> list[str]:
    """A bar a rank, of at most ``width`` columns, and what its marks mean."""
    label = len(str(len(ranks) - 1))
    columns = max(10, width - len("rank  ") - label)
    bars = [f"rank {rank.rank:>{label}} " + _draw([a for a in actions if a.rank == rank.rank], step_seconds, columns)
            for rank in ranks]
    return [*bars, *textwrap.wrap(_LEGEND, width)]


def _draw(actions: Sequence[StageAction], step_seconds: float, columns: int) -> str:
    """A column shows what takes most of it."""
    column = step_seconds / columns or 1.0
    shown = [(1e-6 * column, ".")] * columns  # what rounding leaves of a neighbour is not shown
    for action in actions:
        mark = _mark(action)
        if not mark:
            continue
        for i in range(int(action.start / column), min(columns, int(action.end / column) + 1)):
            share = min(action.end, (i + 1) * column) - max(action.start, i * column)
            if share > shown[i][0]:
                shown[i] = share, mark
    return "".join(mark for _, mark in shown)


def _mark(action: StageAction) -> str:
    number = (action.micro_batch or 0) % 10
    marks = {"forward": str(number), "backward": "abcdefghij"[number], "backward_input": "abcdefghij"[number],
             "backward_weight": "w", "optimizer": "=", "reduce_grad": "+", "shared": "+", "unshard": "+"}
    return marks.get(action.kind, "")


def list_seconds(ranks: Sequence[RankTime], step_seconds: float) -> list[str]:
    """A table of what each rank's seconds are spent on."""
    rows = [[str(rank.rank), ",".join(map(str, rank.stages)), *(format_seconds(seconds) for seconds in (
        rank.compute_seconds, rank.optimizer_seconds, rank.exposed_transfer_seconds, rank.exposed_group_seconds,
        rank.bubble_seconds)), format_percent(rank.bubble_seconds / step_seconds if step_seconds else None),
        format_seconds(rank.warmup_seconds)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [list(_COLUMNS), *rows]]
