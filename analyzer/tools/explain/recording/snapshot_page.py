"""A memory snapshot as a page: what was held over time, and what its segments are lost to."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analyzer.report.page.document import Headline, Panel, Tile, headline_part, summary_part, write_page, write_table
from analyzer.report.text_width import escape_controls
from analyzer.units import format_bytes, format_percent

from .growth import StepGrowth
from .history import History
from .line import CATEGORIES, Lines
from .reserve import Keeper, ReservedPart
from .snapshot import Snapshot
from .snapshot_report import DeviceReport

_MOMENTS = 6_000  # of the timeline; each stands for its neighbours and is the highest of them
_MOST_DRAWN = 60  # segments, those with the most bytes in no use
_NARROWEST = 1 / 500  # of a segment's bar: narrower neighbours are drawn as one
# Categories by the words of predictions, whose colours the page has.
_SHOWN = {"parameters": "parameter", "activations": "activation", "gradients": "gradient",
          "optimizer states": "optimizer state", "temporaries of forward": "temporary",
          "temporaries of backward": "temporary", "temporaries of the optimizer": "temporary"}


def write_snapshot_page(path: Path, snapshot: Snapshot, report: DeviceReport, history: History, lines: Lines,
                        categories: Sequence[str], parts: Sequence[ReservedPart], keepers: Sequence[Keeper],
                        growth: StepGrowth | None, text: str) -> None:
    """Write the page. Raises OutputError where no file can be written there."""
    tiles = [Tile("Peak", format_bytes(report.peak_bytes), "held"),
             Tile("Before recording", format_bytes(report.start_bytes)),
             Tile("Reserved at the end", format_bytes(report.end_reserved_bytes))]
    headline = Headline("unknown", f"{snapshot.name}: {format_bytes(report.peak_bytes)} held at most on device "
                                   f"{report.device}", (f"{report.events:,} events",))
    whole = max(report.end_reserved_bytes, 1)
    reserved = write_table(("Reserved at the end", "Bytes", "Share", "Segments"), [
        (part.name, format_bytes(part.bytes), format_percent(part.bytes / whole),
         "" if part.segments is None else f"{part.segments:,}") for part in parts])
    kept = write_table(("Line that keeps segments", "Segments", "Of", "Not in use"), [
        (keeper.line, f"{keeper.segments:,}", format_bytes(keeper.bytes), format_bytes(keeper.free_bytes))
        for keeper in keepers])
    panels = [headline_part(headline, tiles)]
    if report.events:
        panels.append(Panel("memory", "Memory over time", describe_moments(history, lines, categories, growth)))
    drawn = draw_segments(history, lines, categories)
    panels += [Panel("text", "Segments", lead=reserved + kept + drawn, has_chart=False), summary_part(text)]
    write_page(snapshot.name, panels, path)


def describe_moments(history: History, lines: Lines, categories: Sequence[str],
                     growth: StepGrowth | None) -> dict[str, Any]:
    """The moments of a history, and the blocks alive at each, as the panel of a profile's memory takes them."""
    events, held = history.memory.events, history.held
    bucket = -(-len(events) // _MOMENTS)
    starts = np.arange(0, len(events), bucket)
    moments = np.array([start + int(held[start:start + bucket].argmax()) for start in starts.tolist()])
    times = events.time_us[moments]
    has_time = bool((events.time_us >= 0).all())
    labels: dict[str, int] = {}
    label = [labels.setdefault(str(lines.of(int(events.stack[moment]))), len(labels)) for moment in moments.tolist()]
    ends = [] if growth is None else growth.ends
    phase = np.searchsorted(ends, moments).tolist() if ends else [0] * len(moments)
    shown = [_SHOWN.get(category, category) for category in categories]
    order = [_SHOWN.get(name, name) for name in CATEGORIES]
    names = sorted(set(shown), key=lambda name: (order.index(name) if name in order else len(order), name))
    holders: dict[tuple[str, str], int] = {}
    blocks: dict[tuple[int, int, int], int] = {}
    born = np.searchsorted(moments, history.born).tolist()
    freed = np.searchsorted(moments, history.died).tolist()
    for block, nbytes in enumerate(history.requested.tolist()):
        if born[block] < freed[block]:  # others live between two moments
            holder = holders.setdefault((str(lines.of_block(history, block)), shown[block]), len(holders))
            key = (holder, born[block], freed[block])
            blocks[key] = blocks.get(key, 0) + nbytes
    nothing = [None] * len(labels)
    return {
        "labels": list(labels), "operators": nothing, "modules": nothing, "sources": nothing,
        "phases": [f"step {number + 1}" for number in range(len(ends) + 1)] if ends else [""],
        "points": {"label": label, "phase": phase, "allocated": held[moments].tolist(),
                   "reserved": history.reserved[moments].tolist(),
                   "seconds": ((times - events.time_us[0]) / 1e6).tolist() if has_time else [None] * len(moments)},
        "categories": names,
        "holders": {"label": [name for name, _ in holders], "module": [""] * len(holders),
                    "category": [names.index(category) for _, category in holders]},
        "blocks": {"holder": [holder for holder, _, _ in blocks], "bytes": list(blocks.values()),
                   "born": [start for _, start, _ in blocks], "freed": [end for _, _, end in blocks]},
        "thinned": len(events) - len(moments)}


def draw_segments(history: History, lines: Lines, categories: Sequence[str]) -> str:
    """HTML of the segments that blocks keep at the end, a bar each with its blocks where they lie; those with the most
    unused bytes first. It needs no script.
    """
    segments, blocks = history.memory.segments, history.memory.blocks
    number_of = {int(history.address[block]): int(block) for block in history.at(len(history.memory.events) - 1)}
    inside: dict[int, list[_ShownBlock]] = {}
    unused = segments.bytes.copy()
    for row in np.flatnonzero(blocks.is_live).tolist():
        segment, address, size = int(blocks.segment[row]), int(blocks.address[row]), int(blocks.bytes[row])
        name = categories[number_of[address]] if address in number_of else "other"
        line = str(lines.of(int(blocks.stack[row]), is_recorded=False))
        inside.setdefault(segment, []).append(
            _ShownBlock(address - int(segments.address[segment]), size, _SHOWN.get(name, name), line))
        unused[segment] -= size
    order = [segment for segment in np.lexsort((-segments.bytes, -unused)).tolist() if segment in inside]
    drawn, rest = order[:_MOST_DRAWN], order[_MOST_DRAWN:]
    longest = int(segments.bytes[drawn].max(initial=1))
    bars = []
    for segment in drawn:
        size, pieces = int(segments.bytes[segment]), inside[segment]
        pool = "private pool" if segments.pool[segment] != (0, 0) else (
            f"{'large' if segments.is_large[segment] else 'small'} blocks, stream {segments.stream[segment]}")
        bars.append(f'<div class="bound"><span title="{pool}">{format_bytes(size)}</span><div class="bar" role="img" '
                    f'aria-label="{pool}: {len(pieces):,} of them" style="width:{max(size / longest, 0.02):.2%}">'
                    f'{_draw_pieces(pieces, size)}</div><span>{format_bytes(int(unused[segment]))}</span></div>')
    more = f"; {len(rest):,} further segments have {format_bytes(int(unused[rest].sum()))} in no use" if rest else ""
    met = sorted({piece.category for segment in drawn for piece in inside[segment]})
    keys = "".join([f'<span><b style="color:{_color_of(name)}">&#9632;</b> {escape(name)}</span>' for name in met])
    return (f'<h3>Where blocks lie</h3><p class="note">Each bar is a segment with blocks in it, and is as long as it; '
            f"what is empty of it is in no use. On the left is its size, on the right what is in no use{more}.</p>"
            f'<div class="keys">{keys}</div>{"".join(bars)}')


class _ShownBlock(NamedTuple):
    """A block within its segment."""

    start: int
    bytes: int
    category: str
    line: str

    @property
    def end(self) -> int:
        return self.start + self.bytes


def _color_of(category: str) -> str:
    return f"var(--{category.replace(' ', '-')}, var(--other))"


def _draw_pieces(pieces: Sequence[_ShownBlock], size: int) -> str:
    """The blocks of a segment and the gaps between them; neighbours that look alike or are narrow are drawn as one."""
    drawn, at, narrow = [], 0, size * _NARROWEST
    runs: list[list[_ShownBlock]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and piece.category == last.category and (
                piece.start - last.end < narrow) and (piece.line == last.line or piece.bytes + last.bytes < narrow):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for run in runs:
        first, end = run[0], run[-1].end
        if first.start > at:
            drawn.append(f'<span style="width:{(first.start - at) / size:.4%}"></span>')
        count = "" if len(run) == 1 else f" in {len(run):,} blocks"
        told = f"{format_bytes(sum(piece.bytes for piece in run))}{count}, {first.category}: {first.line}"
        drawn.append(f'<span style="width:{(end - first.start) / size:.4%};background:{_color_of(first.category)}" '
                     f'title="{escape(escape_controls(told))}"></span>')
        at = end
    return "".join(drawn)
