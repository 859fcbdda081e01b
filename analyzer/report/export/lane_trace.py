"""The spans of a step as Chrome trace events: a track for the host and for each stream, arrows from launches to
kernels, counters of memory and of FLOP/s.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from analyzer.profilers.schedule import PICOSECONDS
from analyzer.results.info import TimelinePoint
from analyzer.results.profile import Profile
from analyzer.results.span import SpanInfo

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
    return [*events, *_count_memory(profile.timeline, shift), *_count_flops(profile, shift)]


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


def _count_memory(timeline: Sequence[TimelinePoint], shift: float) -> Iterator[dict[str, Any]]:
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
