"""Modules and operators over the time of a step, in the file format of speedscope.app, a viewer of flame graphs
(https://www.speedscope.app/file-format-schema.json).
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.report.data_table import ROOT
from analyzer.results.info import ModuleInfo, OperatorInfo
from analyzer.results.profile import Profile
from analyzer.results.span import SpanInfo
from analyzer.results.view import register_exporter

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_Stack = tuple[str, ...]


class _Frames:
    """Names of frames, each with its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def find(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def list(self) -> list[dict[str, str]]:
        return [{"name": name} for name in self.numbers]


@register_exporter.shipped("speedscope")
def to_speedscope(profile: Profile, path: str | Path | None = None) -> dict[str, Any]:
    """The file as a dictionary, also written to ``path`` as JSON if one is given.

    A profile with spans gives a flame graph for each lane, in time: the phase, the modules from the outermost, the
    operator. A module lasts from its first kernel (or launch) to its last, waits within included. Of another profile
    there is one of all operators, as long as their seconds where all are known, as they are where they were measured,
    else as their FLOPs; those of which FLOPs are unknown are left out. Raises InputError where neither is known.
    """
    frames = _Frames()
    types = {} if profile.modules is None else {module.path: module.type for module in profile.modules.walk()}
    lanes = dict.fromkeys(span.lane for span in profile.spans)
    flames = [_draw_lane(lane, [span for span in profile.spans if span.lane == lane], profile, types, frames)
              for lane in sorted(lanes, key=lambda lane: (lane == "host", lane != "compute"))]
    if not flames:
        flames = [_sum_operators(profile, types, frames)]
    data = {"$schema": _SCHEMA, "name": f"{profile.name} ({profile.mode}, {profile.how_timed})",
            "exporter": f"analyzer {profile.analyzer_version}".strip(), "activeProfileIndex": 0,
            "shared": {"frames": frames.list()}, "profiles": flames}
    if path is not None:
        write_output(path, json.dumps(data, allow_nan=False, separators=(",", ":")))
    return data


def _list_stack(phase: str, path: str, operator: str, types: dict[str, str]) -> _Stack:
    """Phase, modules and operator, the outermost first."""
    parts = path.split(".") if path else []
    paths = ["", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))]
    modules = [f"{path or ROOT}: {types[path]}" if path in types else path for path in paths if path or "" in types]
    return (phase, *modules, operator)


def _draw_lane(lane: str, spans: Sequence[SpanInfo], profile: Profile, types: dict[str, str],
               frames: _Frames) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    stack: _Stack = ()
    end = 0.0
    for span in spans:
        start = _to_nanoseconds(span.start_seconds)
        found = _list_stack(span.phase, span.module_path, span.operator or span.name, types)
        kept = _count_common(stack, found[:-1])  # an operator is a frame for each call
        events += [{"type": "C", "frame": frames.find(name), "at": end} for name in reversed(stack[kept:])]
        events += [{"type": "O", "frame": frames.find(name), "at": start} for name in found[kept:]]
        stack, end = found, _to_nanoseconds(span.end_seconds)
    events += [{"type": "C", "frame": frames.find(name), "at": end} for name in reversed(stack)]
    whole = _to_nanoseconds(profile.step_seconds or 0.0)
    return {"type": "evented", "name": lane, "unit": "nanoseconds", "startValue": 0, "endValue": max(whole, end),
            "events": events}


def _to_nanoseconds(seconds: float) -> float:
    """Nanoseconds with three decimals, so that times that are equal stay so."""
    return round(seconds * PICOSECONDS) / 1000


def _count_common(one: _Stack, other: _Stack) -> int:
    """How many frames two stacks have in common, from the outermost on."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _sum_operators(profile: Profile, types: dict[str, str], frames: _Frames) -> dict[str, Any]:
    rows = list(_list_operators(() if profile.modules is None else profile.modules.walk()))
    seconds = [row.seconds for _, row in rows]
    is_timed = None not in seconds and any(seconds)
    weights = seconds if is_timed else [row.flops for _, row in rows]
    samples = [([frames.find(name) for name in _list_stack(row.phase, path, row.operator, types)], weight)
               for (path, row), weight in zip(rows, weights) if weight]
    if not samples:
        raise InputError("to_speedscope(): neither the time nor the FLOPs of an operator are known; profile with a "
                         "device")
    return {"type": "sampled", "name": "operators by " + ("time" if is_timed else "FLOPs"),
            "unit": "seconds" if is_timed else "none", "startValue": 0, "endValue": sum(w for _, w in samples),
            "samples": [stack for stack, _ in samples], "weights": [weight for _, weight in samples]}


def _list_operators(modules: Iterable[ModuleInfo]) -> Iterator[tuple[str, OperatorInfo]]:
    """The operators of each module with its path, phase after phase."""
    rows = [(module.path, row) for module in modules for row in module.operators]
    phases = dict.fromkeys(row.phase for _, row in rows)
    for phase in phases:
        yield from ((path, row) for path, row in rows if row.phase == phase)
