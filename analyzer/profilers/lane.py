"""Each stream of the last step as a lane: when its kernels start and end."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from analyzer.hardware import DeviceSpec
from analyzer.record.log import Log

from .call_timer import CallTimer, UnknownTimeError
from .schedule import PICOSECONDS
from .stream_schedule import KernelRun, schedule_steps


class LaneSpan(NamedTuple):
    """The kernels of one call: its index in `Log.calls`, what they do (``"compute"``, ``"communication"``, ``"copy to
    host"``, ``"copy from host"``), seconds from the beginning of the step, and of communication those in which nothing
    is computed.
    """

    call: int
    kind: str
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0


class Lane(NamedTuple):
    """One stream: ``"stream 0"`` is the default one, others are numbered in the order in which they are used first;
    that of a process group, on which its functional collectives run, has the group's name.
    """

    name: str
    spans: tuple[LaneSpan, ...]


def lanes(log: Log, device: DeviceSpec) -> tuple[Lane, ...] | None:
    """The streams of the last step on ``device`` that have kernels; None where the time of a call is not known."""
    try:
        *_, last = schedule_steps(log, CallTimer(log, device))
    except UnknownTimeError:
        return None
    by_stream: defaultdict[Hashable, list[KernelRun]] = defaultdict(list)
    for run in last.runs:
        by_stream[run.stream].append(run)
    numbers: dict[Hashable, int] = {stream: i for i, stream in enumerate(log.streams.list_streams())}
    return tuple(Lane(stream if isinstance(stream, str) else f"stream {numbers[stream]}", tuple(map(_describe, runs)))
                 for stream, runs in by_stream.items())


def _describe(run: KernelRun) -> LaneSpan:
    start, end, exposed = (picoseconds / PICOSECONDS for picoseconds in (run.start, run.end, run.exposed))
    return LaneSpan(run.call, run.kind, start, end, exposed)
