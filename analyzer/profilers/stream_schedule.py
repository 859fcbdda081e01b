"""A step on streams: what runs on each, and what overlaps."""
from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from analyzer.meta.address_space import STREAMS_A_DEVICE
from analyzer.meta.state import EVERY_STREAM, StreamAction, StreamMark
from analyzer.record.call_table import OpCall
from analyzer.record.device_log import NO_STEP
from analyzer.record.log import Log

from .call_sequence import WAIT_TENSOR, WRAP_TENSOR, CallSequence, CallTimer, TimedCall, is_functional
from .schedule import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    LAUNCH,
    PICOSECONDS,
    SYNC,
    WAIT,
    FreeAt,
    Lanes,
    LaneSpan,
    Moment,
    PhaseTime,
    StreamClock,
)

Interval = tuple[int, int]  # start, end


class Cover:
    """How much of the time is covered by intervals, which may overlap each other.

    >>> cover = Cover([(0, 10), (5, 20), (30, 40)])
    >>> cover.before(35), cover.within(15, 32), cover.within(20, 30)
    (25, 7, 0)
    """

    def __init__(self, intervals: Iterable[Interval]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts = [start for start, _ in merged]
        self._lengths = [end - start for start, end in merged]
        self._sums = [0, *accumulate(self._lengths)]

    def before(self, time: int) -> int:
        last = bisect_right(self._starts, time) - 1
        return 0 if last < 0 else self._sums[last] + min(self._lengths[last], time - self._starts[last])

    def within(self, start: int, end: int) -> int:
        return self.before(end) - self.before(start)


class KernelRun(NamedTuple):
    """The kernels of one call; picoseconds from the beginning of the step."""

    call: int             #: index in `Log.calls`
    stream: Hashable      #: its number, or the name of the process group whose own stream it is
    start: int
    end: int
    kind: str             #: as `find_kind` tells
    waited: int = 0       #: in which nothing ran before it, but for gaps between kernels of one call
    exposed: int = 0      #: of communication, those in which nothing is computed; of several at once, the first one's


class HostRun(NamedTuple):
    """What the host does for a call, or for a wait before it (``is_asked``): from ``launched`` to ``end`` it waits."""

    call: int             #: index in `Log.calls`
    start: int
    launched: int
    end: int
    is_asked: bool = False


class ScheduledStep(NamedTuple):
    """The kernels of one step in the order of their launches, what the host did, and the time of each phase and of its
    parts, in order.
    """

    step: int
    runs: list[KernelRun]
    hosts: list[HostRun]
    phases: dict[str, PhaseTime]
    parts: list[tuple[str, PhaseTime]]


def schedule_steps(sequence: CallSequence, timed: Sequence[TimedCall] | None = None, first: int = NO_STEP, *,
                   notes_host: bool = False) -> Iterator[StepSchedule]:
    """Steps from the ``first`` on, each on an idle device; calls take what ``timed`` says, by default as predicted."""
    timed = sequence.timer.timed if timed is None else timed
    # of calls that launch nothing and wait for nothing, what the host takes; None of others
    hosts = [None if notes_host or call.work.device or call.work.waits else call.work.host for call in timed]
    phases = [phase for phase in sequence.phases if phase[0].step >= first]
    if not phases:  # a script that computes nothing
        return
    marks: deque[StreamMark] = deque()
    current = sequence.log.streams.streams_at(phases[0][0].first_call - 1)
    for step, parts in groupby(phases, key=lambda phase: phase[0].step):
        schedule = StepSchedule(sequence, step, current, notes_host)
        for record, run, asked in parts:
            marks.extend(asked)
            for index, number, may_wait in zip(run.places, run.calls, run.may_wait):
                while marks and marks[0].call <= index:
                    schedule.ask(index, marks.popleft())
                if (host := hosts[number]) is None or may_wait:
                    schedule.run(index, timed[number], may_wait)
                else:
                    schedule.clock.host += host
            schedule.boundaries.append((record.phase, len(schedule.launches), schedule.clock.host))
        yield schedule
        current = schedule.current


class StepSchedule:
    """One step, call by call."""

    def __init__(self, calls: CallSequence, step: int, current: dict[int, int], notes_host: bool) -> None:
        self._calls, self.step, self._notes_host = calls, step, notes_host
        self.current = current  #: streams, by index of the device
        self.clock = StreamClock()
        self.launches: list[tuple[int, Hashable, TimedCall]] = []
        self._hosts: list[HostRun] = []
        self.boundaries: list[tuple[str, int, int]] = []  #: phase, launches before its end, the host's time then
        self._events: dict[int, Moment] = {}     # by number
        self._results: dict[int, Moment] = {}    # when a functional collective is done, by storage

    def ask(self, index: int, mark: StreamMark) -> None:
        """The program asks something of a stream before a call; an earlier step's events have happened."""
        action, clock = mark.action, self.clock
        if action is StreamAction.SWITCH:
            self.current[mark.stream // STREAMS_A_DEVICE] = mark.stream
        elif action is StreamAction.RECORD:
            self._events[mark.event] = clock.record(mark.stream)
        elif action is StreamAction.WAIT:
            if (moment := self._events.get(mark.event)) is not None:
                clock.wait(mark.stream, moment)
        elif action is StreamAction.SYNCHRONIZE:
            moments = [self._events.get(mark.event)] if mark.event else [
                clock.record(stream) for stream in self._list_awaited(mark.stream)]
            if moments != [None]:
                start = clock.host
                for moment in moments:
                    clock.synchronize(moment, 0)
                clock.host += self._calls.timer.host.notice_picoseconds
                self._hosts.append(HostRun(index, start, start, clock.host, True))

    def _list_awaited(self, stream: int) -> list[Hashable]:
        """The stream that the host waits for, or where a device is meant each of its streams."""
        if stream >= 0:
            return [stream]
        device = EVERY_STREAM - stream
        return [known for known in self.clock.streams  # collectives have streams by name, and one device
                if not isinstance(known, int) or known // STREAMS_A_DEVICE == device]

    def _stream_of(self, device: int) -> int:
        return self.current.get(device, device * STREAMS_A_DEVICE)

    def run(self, index: int, timed: TimedCall, may_wait: bool) -> None:
        """A call is made: its kernels are launched on the current stream. It ``may_wait`` for a collective."""
        work, start, may_wait = timed.work, self.clock.host, may_wait and bool(self._results)
        if not (work.device or work.waits or may_wait or self._notes_host):
            self.clock.host += work.host
            return
        if may_wait:
            self._wait_for_results(self._calls.log.call_slots[index], timed)
        if not work.device:
            self.clock.host += work.host
        elif timed.kind == COMMUNICATION and is_functional(timed.signature):
            self._run_functional(self._calls.log.call_slots[index], index, timed)
        else:
            self._launch(index, timed, self._stream_of(timed.place))
        launched = self.clock.host
        if work.waits:
            self.clock.synchronize(self.clock.record(self._stream_of(timed.place)), work.notice)
        if self._notes_host:
            self._hosts.append(HostRun(index, start, launched, self.clock.host))

    def _wait_for_results(self, call: OpCall, timed: TimedCall) -> None:
        """The results of functional collectives are waited for with ``wait_tensor``, which `AsyncCollectiveTensor`
        calls when one is used first, but for views (torch/distributed/_functional_collectives.py).
        """
        found = [number for number in dict.fromkeys(call.inputs) if number in self._results]
        name = call.signature.op._schema.name if timed.kind == COMMUNICATION else ""
        if name == WRAP_TENSOR:
            self._results.update((out, self._results[number]) for out in call.outputs for number in found)
        elif timed.work.device or name == WAIT_TENSOR:
            for number in found:
                self.clock.wait(self._stream_of(timed.place), self._results.pop(number))

    def _launch(self, index: int, timed: TimedCall, stream: Hashable) -> None:
        """Launch the kernels of a call. A copy into another device is on the source's stream, after what both streams
        were given before it and ahead of what they are given later: ``copy_kernel_cuda`` of ATen/native/cuda/Copy.cu.
        """
        clock, other = self.clock, None if timed.into is None else self._stream_of(timed.into)
        if other is not None:
            clock.wait(stream, clock.record(other))
        clock.launch(stream, timed.work.host, timed.work.device, timed.turn, timed.holds)
        if other is not None:
            clock.wait(other, clock.record(stream))
        self.launches.append((index, stream, timed))

    def _run_functional(self, call: OpCall, index: int, timed: TimedCall) -> None:
        """A functional collective runs on its group's stream, after what was launched on the current one
        (torch/csrc/distributed/c10d/Functional.cpp; ProcessGroupNCCL.cpp, `collective`).
        """
        clock, group = self.clock, self._calls.log.group_of(call.signature)
        stream = "functional collectives" if group is None else group.name
        clock.wait(stream, clock.record(self._stream_of(timed.place)))
        self._launch(index, timed, stream)
        self._results.update(dict.fromkeys(call.outputs, clock.record(stream)))

    def end(self) -> int:
        self.clock.settle()
        return max(self.clock.host, self.clock.latest)

    def finish(self) -> ScheduledStep:
        """When all ran. The gaps between the kernels of a call are put before them."""
        clock = self.clock
        clock.settle()
        runs = [KernelRun(index, stream, end - delay - round(timed.kernel.seconds * PICOSECONDS), end, timed.kind)
                for (index, stream, timed), end, delay in zip(self.launches, clock.ends, clock.delays)]
        busy, computing = (Cover((run.start, run.end) for run in chosen) for chosen in (
            runs, [run for run in runs if run.kind == COMPUTE]))
        reached = 0
        for place in sorted(range(len(runs)), key=lambda i: (clock.starts[i], i)):
            if (start := clock.starts[place]) > reached:
                runs[place] = runs[place]._replace(waited=start - reached)
            reached = max(reached, clock.ends[place])
        reached = 0  # of communication at one time, what is exposed is of the one that began first
        for i in sorted((i for i, run in enumerate(runs) if run.kind == COMMUNICATION),
                        key=lambda i: (runs[i].start, runs[i].end)):
            start, end = max(runs[i].start, reached), runs[i].end
            if end > start:
                runs[i], reached = runs[i]._replace(exposed=end - start - computing.within(start, end)), end
        phases: defaultdict[str, PhaseTime] = defaultdict(PhaseTime)
        parts = []
        begin = first = 0  # a phase ends when all is done that was launched before its end
        for phase, last, host in self.boundaries:
            end = max([begin, host, *self.clock.ends[first:last]])
            parts.append((phase, PhaseTime(end - begin, end - begin - busy.within(begin, end),
                                           sum(run.exposed for run in runs[first:last]))))
            phases[phase] += parts[-1][1]
            begin, first = end, last
        return ScheduledStep(self.step, runs, self._hosts, phases, parts)


def find_lanes(log: Log, timer: CallTimer) -> Lanes:
    """The lanes of a log on the timer's device. Raises UnknownTimeError where the time of a call is not known."""
    steps = [schedule.finish() for schedule in schedule_steps(CallSequence(log, timer), notes_host=True)
             if schedule.step != NO_STEP]
    starts: dict[int, int] = {}
    begin = 0
    for step in reversed(steps):  # each begins when the one before it is done
        begin -= sum(time.total for time in step.phases.values()) if step is not steps[-1] else 0
        starts.update((run.call, begin + run.start) for run in step.hosts if not run.is_asked)
    if steps and steps[-1].hosts:
        starts[len(log.call_slots)] = steps[-1].hosts[-1].end
    spans = list(_list_spans(steps[-1], timer)) if steps else []
    order = sorted(range(len(spans)), key=lambda i: spans[i].start)
    place_of = {place: new for new, place in enumerate(order)}
    return Lanes([span if (span := spans[i]).launch is None else span._replace(launch=place_of[span.launch])
                  for i in order], starts)


def _list_spans(step: ScheduledStep, timer: CallTimer) -> Iterator[LaneSpan]:
    """The spans of a step, those of each call's kernels behind its launch."""
    runs = {run.call: run for run in step.runs}
    place = 0
    for host in step.hosts:
        run = None if host.is_asked else runs.get(host.call)
        if timer.is_host and not host.is_asked:  # the host runs the kernels itself, at the end of its time
            length = round(timer.time(timer.log.calls[host.call]).kernel.seconds * PICOSECONDS)
            run = KernelRun(host.call, 0, host.end - length, host.end, COMPUTE) if length else None
        launched = run.start if run is not None and timer.is_host else host.launched
        waiting = SYNC if host.is_asked else WAIT
        launch = None
        for kind, start, end in ((LAUNCH, host.start, launched), (waiting, host.launched, host.end)):
            if end > start:
                launch = place if kind == LAUNCH else launch
                place += 1
                yield LaneSpan(host.call, HOST, kind, start, end)
        if run is not None and run.end > run.start:
            place += 1
            yield LaneSpan(run.call, run.stream, run.kind, run.start, run.end, launch)


def time_phases(sequence: CallSequence, timed: Sequence[TimedCall],
                first: int = NO_STEP) -> dict[tuple[int, str], PhaseTime]:
    """Phases of steps from the ``first`` on: a step begins on an idle device, a phase ends when all of it is done."""
    works = [call.work for call in timed]
    times: defaultdict[tuple[int, str], PhaseTime] = defaultdict(PhaseTime)
    phases = [phase for phase in sequence.phases if phase[0].step >= first]
    for step, parts in groupby(phases, key=lambda phase: phase[0].step):
        clock = FreeAt()
        for record, run, _ in parts:
            start = max(clock)
            clock = clock.after(*[works[number] for number in run.calls])
            times[step, record.phase] += PhaseTime(max(clock) - start)
    return times
