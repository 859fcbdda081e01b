"""Files for viewers: the step in time for Perfetto, and memory for pytorch.org/memory_viz."""
from __future__ import annotations

import json
import pickle  # nosec B403 # written, as the viewer reads nothing else, and never read
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.memory.allocator_options import AllocatorOptions
from analyzer.output import write_output
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.results.info import MemoryEvent, TimelinePoint
from analyzer.results.lane import SpanInfo
from analyzer.results.profile import ProfileData
from analyzer.results.timeline import change_pages, join_spans
from analyzer.results.view import register_exporter

# The step in time. The format is the "Trace Event Format" of the Chromium project: times and durations in microseconds,
# ``ph`` "X" for a complete event, "C" for a counter, "s" and "f" for the ends of an arrow, "M" for the names of tracks.

_HOST, _DEVICE = 1, 2
_PHASE_TID = 0                 # of the host: which phase it is in
_MICROSECONDS = 1e6            # in a second
_RESOLUTION = 1e-3             # Perfetto keeps nanoseconds
_Key = tuple[str, str, str | None]  # module, phase, operator


@register_exporter.shipped("chrome_trace")
def to_chrome_trace(profile: ProfileData, path: str | Path | None = None) -> dict[str, Any]:
    """The trace as a dictionary, also written to ``path`` as JSON if one is given: a track for the host and for each
    stream, with arrows from a launch to its kernels, and counters of memory and of FLOP/s at their times. Without spans
    there is no event in it, and ``otherData`` says so.
    """
    times = profile.seconds_method if profile.spans else "no time of a kernel is known"
    other = {"times": times, "device": profile.device or "unknown", "analyzer": profile.analyzer_version}
    if profile.uncounted:
        other["FLOPs not counted"] = ", ".join([row.operator for row in profile.uncounted])
    trace = {"traceEvents": list_events(profile), "displayTimeUnit": "ms", "otherData": other}
    if path is not None:
        write_output(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))
    return trace


def list_events(profile: ProfileData) -> list[dict[str, Any]]:
    """The events of a profile; its steady step begins at 0, or the earlier one of which memory is shown."""
    spans = profile.spans
    shift = max(0.0, -min([point.seconds for point in profile.timeline if point.seconds is not None], default=0.0))
    lanes = list(dict.fromkeys(span.lane for span in spans if span.lane != "host"))
    tracks = {"host": (_HOST, 1), **{lane: (_DEVICE, i) for i, lane in enumerate(lanes, 1)}}
    what = f"{profile.name} ({profile.mode}, {profile.how_timed})"
    events = [_name_track("process_name", _HOST, _PHASE_TID, f"{what}: host"),
              _name_track("process_name", _DEVICE, 0, f"{what}: {profile.device or 'device'}"),
              _name_track("thread_name", _HOST, _PHASE_TID, "phase"),
              *[_name_track("thread_name", *track, lane) for lane, track in tracks.items()],
              *_list_phases(spans, shift)]
    sources = {node.name: node.source for node in profile.nodes}
    for i, span in enumerate(spans):
        pid, tid = tracks[span.lane]
        start = (span.start_seconds + shift) * _MICROSECONDS
        args = {"operator": span.operator, "node": span.node, "module": span.module_path, "phase": span.phase,
                "source": sources.get(span.node or "")}
        events.append({"name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "ph": "X", "ts": start,
                       "dur": span.seconds * _MICROSECONDS,
                       "args": {name: value for name, value in args.items() if value is not None}})
        if span.launch is not None:
            launched = (spans[span.launch].start_seconds + shift) * _MICROSECONDS
            events.append(_arrow("s", i, _HOST, 1, launched))
            events.append({**_arrow("f", i, pid, tid, start), "bp": "e"})
    return [*events, *_count_memory(profile.timeline, shift), *_count_flops(profile, shift)]


def _name_track(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _arrow(end: str, number: int, pid: int, tid: int, time: float) -> dict[str, Any]:
    return {"name": "launch", "cat": "launch", "ph": end, "id": number, "pid": pid, "tid": tid, "ts": time}


def _list_phases(spans: Sequence[SpanInfo], shift: float) -> Iterator[dict[str, Any]]:
    for phase, group in groupby([span for span in spans if span.lane == "host"], key=lambda span: span.phase):
        stretch = list(group)
        start, end = stretch[0].start_seconds, stretch[-1].end_seconds
        yield {"name": phase, "cat": "phase", "pid": _HOST, "tid": _PHASE_TID, "ph": "X", "args": {},
               "ts": (start + shift) * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}


def _count_memory(timeline: Sequence[TimelinePoint], shift: float) -> Iterator[dict[str, Any]]:
    """A counter of memory at the points whose time is known. Of points of one time the later ones follow at once."""
    reached = float("-inf")
    for point in timeline:
        if point.seconds is not None:
            reached = max((point.seconds + shift) * _MICROSECONDS, reached + _RESOLUTION)
            args = {"allocated": point.allocated_bytes, "reserved": point.reserved_bytes}
            yield {"ph": "C", "pid": _DEVICE, "tid": 0, "ts": reached, "name": "memory bytes",
                   "args": {name: value for name, value in args.items() if value is not None}}


def _count_flops(profile: ProfileData, shift: float) -> Iterator[dict[str, Any]]:
    """A counter of the FLOP/s of the kernels that run; of those whose FLOPs are unknown there are none."""
    rates = _find_rates(profile)
    changes: defaultdict[int, list[tuple[int, float | None]]] = defaultdict(list)  # by picosecond
    for i, span in enumerate(profile.spans):
        if rate := rates.get(_key(span)) if span.kind == "kernel" else None:
            changes[round(span.start_seconds * PICOSECONDS)].append((i, rate))
            changes[round(span.end_seconds * PICOSECONDS)].append((i, None))
    running: dict[int, float] = {}
    for time in sorted(changes):
        for i, rate in changes[time]:
            if rate is None:
                running.pop(i)
            else:
                running[i] = rate
        yield {"ph": "C", "pid": _DEVICE, "tid": 0, "ts": (time / PICOSECONDS + shift) * _MICROSECONDS,
               "name": "FLOP/s", "args": {"FLOP/s": sum(running.values())}}


def _key(span: SpanInfo) -> _Key:
    return span.module_path, span.phase, span.operator


def _find_rates(profile: ProfileData) -> Mapping[_Key, float]:
    """FLOPs to a second of the kernels of each operator, by its module and phase, where they are known."""
    flops: dict[_Key, int | None] = {}
    for module in () if profile.modules is None else profile.modules.walk():
        for row in module.operators:
            key = module.path, "backward" if row.phase == "recompute" else row.phase, row.operator
            before = flops.get(key, 0)
            flops[key] = None if before is None or row.flops is None else before + row.flops
    seconds: defaultdict[_Key, float] = defaultdict(float)
    for span in profile.spans:
        if span.kind == "kernel":
            seconds[_key(span)] += span.seconds
    return {key: known / seconds[key] for key, known in flops.items() if known and seconds[key]}


# The memory events as a snapshot of the CUDA caching allocator. The fields are those that
# `torch.cuda.memory._snapshot` documents; what the viewer makes of them is in ``torch/utils/viz/MemoryViz.js``.

_ACTIONS = ("alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
_POOL = (0, 0)  # the default memory pool
# kSmallBuffer of c10/cuda/CUDACachingAllocator.cpp: segments of the small pool have this size, others more
_SMALL_SEGMENT_BYTES = 2 * 1024 * 1024
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own unpickler reads


@register_exporter.shipped("memory_snapshot")
def to_memory_snapshot(profile: ProfileData, path: str | Path | None = None) -> dict[str, Any]:
    """The snapshot as a dictionary, also pickled to ``path`` if one is given, with each of several devices. Where the
    events do not say in which segment an address lies, the span of addresses in use counts as one. Raises InputError
    for a profile without memory events, and for events that contradict one another.
    """
    if not profile.memory_events:
        raise InputError("to_memory_snapshot(): this profile has no memory events (its `memory_events` is empty); "
                         "profile with ProfileOptions(keep_events=True)")
    frames = {node.name: _frame(node.source, node.name) for node in profile.nodes if node.source}
    by_device: dict[int, list[tuple[int, MemoryEvent]]] = {i: [] for i in range(max(1, len(profile.devices)))}
    for place in enumerate(profile.memory_events):
        by_device.setdefault(place[1].device, []).append(place)
    times, settings = _find_times(profile), profile.allocator_settings
    found = [_describe_device(device, events, frames, times) for device, events in by_device.items()]
    snapshot = {"segments": [segment for segments, _ in found for segment in segments],
                "device_traces": [traces for _, traces in found],
                "allocator_settings": {} if settings is None else AllocatorOptions.from_string(settings).snapshot(),
                "external_annotations": [one for device in by_device for one in _list_annotations(profile, device)]}
    if path is not None:
        write_output(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))
    return snapshot


def _find_times(profile: ProfileData) -> list[int]:
    """Microseconds of each memory event since the first one; none where times are unknown."""
    known = [(point.event, point.seconds) for point in profile.timeline
             if point.event is not None and point.seconds is not None]
    if not known:
        return []
    found: list[int] = []
    reached = start = min(seconds for _, seconds in known)
    for event, seconds in known:  # what happened by then
        found += [_microseconds(reached - start)] * (event - len(found))
        reached = max(reached, seconds)
    return found + [_microseconds(reached - start)] * (len(profile.memory_events) - len(found))


def _microseconds(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def _list_annotations(profile: ProfileData, device: int) -> Iterator[dict[str, Any]]:
    """Where each phase begins and ends, as torch writes blocks of ``record_function``."""
    known = [(point.phase, point.seconds) for point in profile.timeline if point.phase and point.seconds is not None]
    for phase, points in groupby(known, key=lambda point: point[0]):
        seconds = [moment - known[0][1] for _, moment in points]
        for stage, moment in (("START", seconds[0]), ("END", seconds[-1])):
            yield {"stage": stage, "name": phase, "device": device, "time_us": _microseconds(moment)}


def _describe_device(device: int, events: Sequence[tuple[int, MemoryEvent]], frames: dict[str, dict[str, Any]],
                     times: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The segments of a device as they are at the end, and the trace of its events, which have their places."""
    traces: list[dict[str, Any]] = []
    live: dict[int, MemoryEvent] = {}
    segments: dict[int, int] = {}
    pages: list[tuple[int, int]] = []  # mapped spans of expandable segments
    for index, event in events:
        if event.action in ("segment_map", "segment_unmap"):
            pages = change_pages(pages, event.action, event.address, event.bytes)
        else:
            _apply(event, index, live, segments)
        entry = {"addr": event.address, "size": _requested(event), "stream": 0, "pool_id": _POOL,
                 "frames": _frames(event, frames), "compile_context": "N/A", "user_metadata": "",
                 "category": event.category or "unknown"}
        if times:
            entry["time_us"] = times[index]
        actions = ("free_requested", "free_completed") if event.action == "free" else (event.action,)
        traces += [{"action": action, **entry} for action in actions]
    segments.update(_span_segments([event for _, event in events]))
    segments.update((start, end - start) for start, end in pages)
    expandable = {start for start, _ in pages}
    # Closes every real trace. The viewer adds a missing category "unknown" to a list it misspells, so it must be here.
    traces.append({"action": "snapshot", "addr": 0, "size": sum(segments.values()), "stream": 0, "pool_id": _POOL,
                   "frames": [], "category": "unknown"})
    blocks = [{"address": event.address, "size": event.bytes, "requested_size": _requested(event),
               "state": "active_allocated", "frames": _frames(event, frames)}
              for event in sorted(live.values(), key=lambda event: event.address)]
    return [_segment(device, address, size, blocks, address in expandable)
            for address, size in sorted(segments.items())], traces


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
    return {"filename": source or category or "??", "line": 0, "name": name}  # as torch names a file that is unknown


def _frames(event: MemoryEvent, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What asked for a block; none of a segment, and where that is unknown."""
    return [known.get(event.label) or _frame(None, event.label, event.category)] if event.label else []


def _requested(event: MemoryEvent) -> int:
    """What the trace and the blocks of torch's snapshot tell; the block's own size where that is unknown."""
    return event.bytes if event.requested_bytes is None else event.requested_bytes


def _segment(device: int, address: int, size: int, live_blocks: list[dict[str, Any]],
             is_expandable: bool) -> dict[str, Any]:
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
    used, requested = (sum(block[size] for block in inside) for size in ("size", "requested_size"))
    return {"device": device, "address": address, "total_size": size, "stream": 0, "segment_pool_id": _POOL,
            "is_expandable": is_expandable, "segment_type": "small" if size <= _SMALL_SEGMENT_BYTES else "large",
            "allocated_size": used, "active_size": used, "requested_size": requested, "blocks": blocks, "frames": []}
