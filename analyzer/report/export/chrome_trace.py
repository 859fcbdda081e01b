"""The predicted step as Chrome trace events: what Perfetto and chrome://tracing open. The format is the "Trace Event
Format" of the Chromium project: times and durations in microseconds, ``ph`` "X" for a complete event, "i" for an
instant, "C" for a counter, "s" and "f" for the ends of an arrow, "M" for the names of tracks.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from analyzer.output import write_output
from analyzer.results.info import TimelinePoint
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

from .lane_trace import count_bytes, list_lane_events, name_track

_PID = 1
_TRACKS = {"forward": 1, "backward": 2, "optimizer": 3}
_MICROSECONDS = 1e6  # in a second


@register_exporter.shipped("chrome_trace")
def to_chrome_trace(profile: Profile, path: str | Path | None = None) -> dict[str, Any]:
    """The trace as a dictionary, also written to ``path`` as JSON if one is given.

    A profile with spans has a track for the host and for each stream, with arrows from a launch to its kernels, and
    counters of memory and of FLOP/s at their times. Of another one, nodes follow one another in their own order forward
    and in reverse backward. A node whose time is unknown is then an instant; where no time is known at all every node
    lasts one microsecond, and ``otherData`` says so. Memory is a counter: a point whose label is a node stands at that
    node's end, others evenly between.
    """
    known = bool(profile.spans) or _is_timed(profile)
    times = profile.seconds_method if known else "no time is known: one microsecond a node"
    other = {"times": times, "device": profile.device or "unknown", "analyzer": profile.analyzer_version}
    if profile.uncounted:
        other["FLOPs not counted"] = ", ".join([row.operator for row in profile.uncounted])
    trace = {"traceEvents": list_lane_events(profile) if profile.spans else _list_node_events(profile, known),
             "displayTimeUnit": "ms", "otherData": other}
    if path is not None:
        write_output(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))
    return trace


def _is_timed(profile: Profile) -> bool:
    """Whether the time of a node is known."""
    return any(seconds is not None for node in profile.nodes for seconds in (node.fwd_seconds, node.bwd_seconds))


def _list_node_events(profile: Profile, known: bool) -> list[dict[str, Any]]:
    events = [name_track("process_name", _PID, 0, f"{profile.name} ({profile.mode}, {profile.how_timed})")]
    events += [name_track("thread_name", _PID, track, phase) for phase, track in _TRACKS.items()]

    clock = 0.0
    spans: dict[str, tuple[float, float]] = {}
    ends: dict[str, dict[str, float]] = {}
    for phase in ("forward", "backward") if profile.mode == "train" else ("forward",):
        start = clock
        ends[phase] = {}
        for node in profile.nodes if phase == "forward" else reversed(profile.nodes):
            seconds = node.fwd_seconds if phase == "forward" else node.bwd_seconds
            duration = 1.0 if not known else None if seconds is None else seconds * _MICROSECONDS
            events.append(_slice(node.name, phase, clock, duration, _describe(node, phase)))
            clock += duration or 0.0
            ends[phase][node.name] = clock
        spans[phase] = (start, clock)
    if profile.optimizer_seconds is not None:
        duration = profile.optimizer_seconds * _MICROSECONDS
        events.append(_slice("optimizer", "optimizer", clock, duration, {"flops": profile.optimizer_flops}))
        spans["optimizer"] = (clock, clock + duration)
    return [*events, *_count_memory(profile.timeline, spans, ends)]


def _slice(name: str, phase: str, start: float, duration: float | None, args: dict[str, Any]) -> dict[str, Any]:
    event = {"name": name, "cat": phase, "pid": _PID, "tid": _TRACKS[phase], "ts": start, "args": args}
    return {**event, "ph": "i", "s": "t"} if duration is None else {**event, "ph": "X", "dur": duration}


def _describe(node: NodeInfo, phase: str) -> dict[str, Any]:
    flops, comm_bytes = ((node.fwd_flops, node.fwd_comm_bytes) if phase == "forward" else
                         (node.bwd_flops, node.bwd_comm_bytes))
    return {"op": node.op, "target": node.target, "module": node.module_path, "source": node.source, "flops": flops,
            "comm_bytes": comm_bytes, "inputs": ", ".join(node.inputs), "outputs": ", ".join(map(str, node.outputs))}


def _count_memory(timeline: Iterable[TimelinePoint], spans: dict[str, tuple[float, float]],
                  ends: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    events = []
    clock = 0.0
    for phase, group in groupby(timeline, key=lambda point: point.phase):
        points = list(group)
        start, end = spans.get(phase or "", (clock, clock))  # a phase without slices, such as zero_grad, takes no time
        for point, time in zip(points, _place(points, max(start, clock), max(end, clock), ends.get(phase or "", {})),
                               strict=True):
            events.append(count_bytes(point, _PID, time))
            clock = time
    return events


def _place(points: Sequence[TimelinePoint], start: float, end: float, ends: dict[str, float]) -> list[float]:
    """Times of the points of one phase, never falling: known at labels that name a node, linear between."""
    anchors = [(-1, start)]
    for i, point in enumerate(points):
        time = ends.get(str(point.label))
        if time is not None and anchors[-1][1] <= time <= end:
            anchors.append((i, time))
    if anchors[-1][0] < len(points) - 1:
        anchors.append((len(points) - 1, end))
    times = []
    for (i, before), (j, after) in pairwise(anchors):
        times += [before + (after - before) * (k - i) / (j - i) for k in range(i + 1, j + 1)]
    return times
