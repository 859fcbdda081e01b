"""When the host makes each call of the last step, and when the kernels of each stream run."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.record.evaluation import NO_STEP
from analyzer.record.log import Log

from .call_sequence import CallSequence
from .call_timer import CallTimer
from .kernel_time.turn import COMPUTE
from .lane import HOST, LAUNCH, SYNCHRONIZE, WAIT, Lanes, LaneSpan
from .schedule import PICOSECONDS
from .stream_schedule import HostRun, KernelRun, ScheduledStep, schedule_steps


def find_lanes(log: Log, timer: CallTimer) -> Lanes:
    """The lanes of a log on the timer's device. Raises UnknownTimeError where the time of a call is not known."""
    steps = [step for step in schedule_steps(CallSequence(log, timer), notes_host=True) if step.step != NO_STEP]
    starts: dict[int, int] = {}
    begin = 0
    for step in reversed(steps):  # each begins when the one before it is done
        begin -= sum(time.total for time in step.phases.values()) if step is not steps[-1] else 0
        starts.update((run.call, begin + run.start) for run in step.hosts if not run.is_asked)
    if steps and steps[-1].hosts:
        starts[len(log.call_slots)] = steps[-1].hosts[-1].end
    return Lanes(_order(list(_list_spans(steps[-1], timer))) if steps else [], starts)


def _list_spans(step: ScheduledStep, timer: CallTimer) -> Iterator[LaneSpan]:
    """The spans of a step, those of each call's kernels behind its launch."""
    runs = {run.call: run for run in step.runs}
    place = 0
    for host in step.hosts:
        run = None if host.is_asked else _find_inline(host, timer) if timer.is_host else runs.get(host.call)
        launched = run.start if run is not None and timer.is_host else host.launched
        waiting = SYNCHRONIZE if host.is_asked else WAIT
        launch = None
        for kind, start, end in ((LAUNCH, host.start, launched), (waiting, host.launched, host.end)):
            if end > start:
                launch = place if kind == LAUNCH else launch
                place += 1
                yield LaneSpan(host.call, HOST, kind, start, end)
        if run is not None and run.end > run.start:
            place += 1
            yield LaneSpan(run.call, run.stream, run.kind, run.start, run.end, launch)


def _find_inline(host: HostRun, timer: CallTimer) -> KernelRun | None:
    """The kernels of a call that the host runs itself, at the end of its time."""
    length = round(timer.time(timer.log.calls[host.call]).kernel.seconds * PICOSECONDS)
    return KernelRun(host.call, 0, host.end - length, host.end, COMPUTE) if length else None


def _order(spans: list[LaneSpan]) -> list[LaneSpan]:
    """By their beginnings, with ``launch`` in that order."""
    order = sorted(range(len(spans)), key=lambda i: spans[i].start)
    place_of = {place: new for new, place in enumerate(order)}
    return [span if (span := spans[i]).launch is None else span._replace(launch=place_of[span.launch]) for i in order]
