"""The memory events as a snapshot of the CUDA caching allocator, which pytorch.org/memory_viz draws. The fields are
those that `torch.cuda.memory._snapshot` documents; what the viewer makes of them is in PyTorch's
``torch/utils/viz/MemoryViz.js``.
"""
from __future__ import annotations

import pickle  # nosec B403 # written, as the viewer reads nothing else, and never read
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.results.info import MemoryEvent
from analyzer.results.profile import Profile
from analyzer.results.timeline import change_pages, join_spans
from analyzer.results.view import register_exporter

_ACTIONS = ("alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
_POOL = (0, 0)  # the default memory pool
# kSmallBuffer of c10/cuda/CUDACachingAllocator.cpp: segments of the small pool have this size, others more
_SMALL_SEGMENT_BYTES = 2 * 1024 * 1024
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own unpickler reads


@register_exporter.shipped("memory_snapshot")
def to_memory_snapshot(profile: Profile, path: str | Path | None = None) -> dict[str, Any]:
    """The snapshot as a dictionary, also pickled to ``path`` if one is given. Where the events do not say in which
    segment an address lies, the span of addresses in use counts as one. Raises InputError for a profile without memory
    events, and for events that contradict one another.
    """
    if not profile.memory_events:
        raise InputError("to_memory_snapshot(): this profile has no memory events (its `memory_events` is empty); "
                         "profile with ProfileOptions(keep_events=True)")
    frames = {node.name: _frame(node.source, node.name) for node in profile.nodes if node.source}
    traces: list[dict[str, Any]] = []
    live: dict[int, MemoryEvent] = {}
    segments: dict[int, int] = {}
    pages: list[tuple[int, int]] = []  # mapped spans of expandable segments
    for index, event in enumerate(profile.memory_events):
        if event.action in ("segment_map", "segment_unmap"):
            pages = change_pages(pages, event.action, event.address, event.bytes)
        else:
            _apply(event, index, live, segments)
        entry = {"addr": event.address, "size": event.bytes, "stream": 0, "pool_id": _POOL,
                 "frames": _frames(event, frames), "category": event.category or "unknown"}
        actions = ("free_requested", "free_completed") if event.action == "free" else (event.action,)
        traces += [{"action": action, **entry} for action in actions]
    segments.update(_span_segments(profile.memory_events))
    segments.update((start, end - start) for start, end in pages)
    expandable = {start for start, _ in pages}
    # Closes every real trace. The viewer adds a missing category "unknown" to a list it misspells, so it must be here.
    traces.append({"action": "snapshot", "addr": 0, "size": sum(segments.values()), "stream": 0, "pool_id": _POOL,
                   "frames": [], "category": "unknown"})
    blocks = [_block(event, frames) for event in sorted(live.values(), key=lambda event: event.address)]
    snapshot = {"segments": [_segment(address, size, blocks, address in expandable)
                             for address, size in sorted(segments.items())],
                "device_traces": [traces]}
    if path is not None:
        write_output(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))
    return snapshot


def _apply(event: MemoryEvent, index: int, live: dict[int, MemoryEvent], segments: dict[int, int]) -> None:
    """Keep track of what is allocated and reserved; a block or segment freed but never seen was there before."""
    known: dict[int, Any] = segments if event.action.startswith("segment") else live
    if event.action not in _ACTIONS:
        problem = f"actions are {', '.join(_ACTIONS)}"
    elif event.action.endswith("alloc") and event.address in known:
        problem = "that address is already in use"
    else:
        if event.action == "alloc":
            live[event.address] = event
        elif event.action == "segment_alloc":
            segments[event.address] = event.bytes
        else:
            known.pop(event.address, None)
        return
    raise InputError(f"to_memory_snapshot(): memory_events[{index}] {tuple(event)!r}: {problem}")


def _span_segments(events: Sequence[MemoryEvent]) -> dict[int, int]:
    """Address and size of each unbroken span that blocks used outside every segment of the events."""
    segments = join_spans({(e.address, e.address + e.bytes) for e in events if e.action.startswith("segment")})
    starts = [start for start, _ in segments]

    def is_inside(address: int) -> bool:
        i = bisect_right(starts, address) - 1
        return i >= 0 and address < segments[i][1]

    outside = (e for e in events if not e.action.startswith("segment") and not is_inside(e.address))
    return {start: end - start for start, end in join_spans({(e.address, e.address + e.bytes) for e in outside})}


def _frame(source: str | None, name: str, category: str = "") -> dict[str, Any]:
    filename, _, line = (source or "").rpartition(":")
    if filename and line.isdigit():
        return {"filename": filename, "line": int(line), "name": name}
    return {"filename": source or category or "unknown", "line": 0, "name": name}


def _frames(event: MemoryEvent, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [known.get(event.label) or _frame(None, event.label or event.action, event.category)]


def _block(event: MemoryEvent, frames: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"address": event.address, "size": event.bytes, "requested_size": event.bytes, "state": "active_allocated",
            "frames": _frames(event, frames)}


def _segment(address: int, size: int, live_blocks: list[dict[str, Any]], is_expandable: bool) -> dict[str, Any]:
    inside = [block for block in live_blocks if address <= block["address"] < address + size]
    blocks: list[dict[str, Any]] = []
    cursor = address
    for block in [*inside, None]:  # blocks must cover the segment, free ones too
        next_address = address + size if block is None else block["address"]
        if next_address > cursor:
            blocks.append({"address": cursor, "size": next_address - cursor, "requested_size": 0, "state": "inactive",
                           "frames": []})
        if block is not None:
            blocks.append(block)
            cursor = block["address"] + block["size"]
    used = sum(block["size"] for block in inside)
    return {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": _POOL,
            "is_expandable": is_expandable, "segment_type": "small" if size <= _SMALL_SEGMENT_BYTES else "large",
            "allocated_size": used, "active_size": used, "requested_size": used, "blocks": blocks, "frames": []}
