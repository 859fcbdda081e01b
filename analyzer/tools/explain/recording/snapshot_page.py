"""A memory snapshot as a page: what was held over time, and what its segments are lost to."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.report.page.document import Headline, Panel, Tile, headline_part, summary_part, write_page, write_table
from analyzer.units import format_bytes, format_percent

from .growth import StepGrowth
from .history import History
from .line import CATEGORIES, Lines
from .reserve import Keeper, ReservedPart
from .snapshot import Snapshot
from .snapshot_report import DeviceReport

_MOMENTS = 6_000  # of the timeline; each stands for its neighbours and is the highest of them
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
    panels += [Panel("text", "Segments", lead=reserved + kept, has_chart=False), summary_part(text)]
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
