"""The step in time as Chrome trace events, which Chrome and Perfetto show."""
from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from analyzer.output import write_output
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.results.info import TimelinePoint
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

# The spans of a step as Chrome trace events: a track for the host and for each stream, arrows from launches to
# kernels, counters of memory and of FLOP/s.

HOST_PID, DEVICE_PID = 1, 2
_PHASE_TID = 0                 # of the host: which phase it is in
_MICROSECONDS = 1e6            # in a second
_RESOLUTION = 1e-3             # Perfetto keeps nanoseconds
_Key = tuple[str, str, str | None]  # module, phase, operator


def list_lane_events(profile: Profile) -> list[dict[str, Any]]:
    """The events of a profile that has spans, its steady step beginning at 0 unless memory is shown of an earlier one,
    whose beginning is 0 then.
    """
    spans = profile.spans
    shift = max(0.0, -min([point.seconds for point in profile.timeline if point.seconds is not None], default=0.0))
    lanes = list(dict.fromkeys(span.lane for span in spans if span.lane != "host"))
    tracks = {"host": (HOST_PID, 1), **{lane: (DEVICE_PID, i) for i, lane in enumerate(lanes, 1)}}
    what = f"{profile.name} ({profile.mode}, {profile.how_timed})"
    events = [name_track("process_name", HOST_PID, _PHASE_TID, f"{what}: host"),
              name_track("process_name", DEVICE_PID, 0, f"{what}: {profile.device or 'device'}"),
              name_track("thread_name", HOST_PID, _PHASE_TID, "phase"),
              *[name_track("thread_name", *track, lane) for lane, track in tracks.items()],
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
            events.append(_arrow("s", i, HOST_PID, 1, launched))
            events.append({**_arrow("f", i, pid, tid, start), "bp": "e"})
    return [*events, *_count_memory_of_lanes(profile.timeline, shift), *_count_flops(profile, shift)]


def name_track(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """The event that names a process or a thread."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _arrow(end: str, number: int, pid: int, tid: int, time: float) -> dict[str, Any]:
    return {"name": "launch", "cat": "launch", "ph": end, "id": number, "pid": pid, "tid": tid, "ts": time}


def _list_phases(spans: Sequence[SpanInfo], shift: float) -> Iterator[dict[str, Any]]:
    """A slice for each stretch of one phase on the host."""
    for phase, group in groupby([span for span in spans if span.lane == "host"], key=lambda span: span.phase):
        stretch = list(group)
        start, end = stretch[0].start_seconds, stretch[-1].end_seconds
        yield {"name": phase, "cat": "phase", "pid": HOST_PID, "tid": _PHASE_TID, "ph": "X", "args": {},
               "ts": (start + shift) * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}


def _count_memory_of_lanes(timeline: Sequence[TimelinePoint], shift: float) -> Iterator[dict[str, Any]]:
    """A counter of memory at the points whose time is known. Of points of one time the later ones follow at once."""
    reached = float("-inf")
    for point in timeline:
        if point.seconds is None:
            continue
        reached = max((point.seconds + shift) * _MICROSECONDS, reached + _RESOLUTION)
        yield count_bytes(point, DEVICE_PID, reached)


def count_bytes(point: TimelinePoint, pid: int, time: float) -> dict[str, Any]:
    """The event of a counter of memory."""
    args = {"allocated": point.allocated_bytes}
    if point.reserved_bytes is not None:
        args["reserved"] = point.reserved_bytes
    return {"ph": "C", "pid": pid, "tid": 0, "ts": time, "name": "memory bytes", "args": args}


def _count_flops(profile: Profile, shift: float) -> Iterator[dict[str, Any]]:
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
        yield {"ph": "C", "pid": DEVICE_PID, "tid": 0, "ts": (time / PICOSECONDS + shift) * _MICROSECONDS,
               "name": "FLOP/s", "args": {"FLOP/s": sum(running.values())}}


def _key(span: SpanInfo) -> _Key:
    return span.module_path, span.phase, span.operator


def _find_rates(profile: Profile) -> Mapping[_Key, float]:
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


# The predicted step as Chrome trace events: what Perfetto and chrome://tracing open. The format is the "Trace Event
# Format" of the Chromium project: times and durations in microseconds, ``ph`` "X" for a complete event, "i" for an
# instant, "C" for a counter, "s" and "f" for the ends of an arrow, "M" for the names of tracks.

_PID = 1
_TRACKS = {"forward": 1, "backward": 2, "optimizer": 3}
  # in a second


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
