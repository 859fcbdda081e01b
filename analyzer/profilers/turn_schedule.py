"""The steps of a log whose kernels run one after the other."""
from __future__ import annotations

from collections import defaultdict, deque

from analyzer.record.log import Log

from .call_timer import CallTimer
from .schedule import Clock, PhaseTime, Stretch


def time_phases(log: Log, timer: CallTimer, first: int = 0) -> dict[tuple[int, str], PhaseTime]:
    """The time of each phase of each step from the ``first`` on. A step begins on an idle device; a phase ends when the
    device has done what came before its end. Raises UnknownTimeError.
    """
    phases, table, works = [record for record in log.phases if record.step >= first], log.call_slots, timer.works
    times: defaultdict[tuple[int, str], PhaseTime] = defaultdict(PhaseTime)
    stretches: dict[tuple[int, int, int], Stretch] = {}
    clock, step, place = Clock(), -1, phases[0].first_call if phases else 0
    parts = deque(part for part in log.placed_parts() if part.first_call >= place)
    for i, record in enumerate(phases):
        if record.step != step:
            clock, step = Clock(), record.step
        start = max(clock)
        end = phases[i + 1].first_call if i + 1 < len(phases) else len(table)
        while parts and parts[0].first_call < end:
            part = parts.popleft()
            key = id(part.segment), part.start, part.stop
            if key not in stretches:
                stretches[key] = Stretch().then_all(works(*part.segment.places(part.start, part.stop, log)))
            clock = clock.after_all(works(table, table.written_places(place, part.first_call)))
            clock, place = stretches[key].end(clock), part.first_call
        clock, place = clock.after_all(works(table, table.written_places(place, end))), end
        times[step, record.phase] += PhaseTime(max(clock) - start)
    return times
