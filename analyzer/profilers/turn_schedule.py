"""The steps of a log whose kernels run one after the other."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from analyzer.record.evaluation import NO_STEP

from .call_sequence import CallSequence
from .call_timer import TimedCall
from .schedule import Clock, PhaseTime, Stretch


def time_phases(sequence: CallSequence, timed: Sequence[TimedCall],
                first: int = NO_STEP) -> dict[tuple[int, str], PhaseTime]:
    """The time of each phase of each step from the ``first`` on, of calls that take what ``timed`` says. A step begins
    on an idle device; a phase ends when the device has done what came before its end.
    """
    works = [call.work for call in timed]
    times: defaultdict[tuple[int, str], PhaseTime] = defaultdict(PhaseTime)
    stretches: dict[int, Stretch] = {}
    clock, step = Clock(), NO_STEP
    for record, runs, _ in sequence.phases:
        if record.step < first:
            continue
        if record.step != step:
            clock, step = Clock(), record.step
        start = max(clock)
        for run in runs:
            if not run.replayed:
                clock = clock.after_all([works[number] for number in run.calls])
                continue
            if (stretch := stretches.get(id(run.calls))) is None:
                stretch = stretches[id(run.calls)] = Stretch().then_all([works[number] for number in run.calls])
            clock = stretch.end(clock)
        times[step, record.phase] += PhaseTime(max(clock) - start)
    return times
