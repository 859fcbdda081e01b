"""What the cycles of a script cost: each phase with its own peak, time, FLOPs and tokens."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import ErrorSum
from analyzer.profilers.call_sequence import Pace, TimedCall, UnknownTimeError
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.held_memory import alive_at, category_of, forward_ends
from analyzer.profilers.latency import Latency, range_at_paces
from analyzer.profilers.schedule import COMMUNICATION, PICOSECONDS, FreeAt
from analyzer.record.call_table import OpCall
from analyzer.record.cycle import LOAD, RESUME, ROLLOUT, SAMPLED, SAVE, Cycle, NamedStretch, PhasePart
from analyzer.record.device_log import EARLIER_PREPARATION, EVALUATION, NO_STEP, PREPARATION, PhaseRecord
from analyzer.record.log import Log, OuterCall
from analyzer.units import add_quantities

from .info import CycleInfo, CyclePhase

SHOWN = 2  # cycles: the first, and the second, whose optimizer states and caches are there already


def describe_cycles(log: Log, cycles: Sequence[Cycle], device: DeviceSpec) -> tuple[CycleInfo, ...]:
    """The first cycles of a log; empty of one of several devices."""
    if log.others:
        return ()
    with log.reading():
        timer = _PhaseTimer(log, device)
        return tuple([_describe(log, number, cycle, timer, log.outer_calls)
                      for number, cycle in enumerate(cycles[:SHOWN], 1)])


#: The phases of all that a script does, by the names of its blocks and by those of the log.
LOADING, FIRST_STEP, STEADY, AFTERWARDS = "loading", "first step", "steady steps", "after the steps"
_OF_BLOCKS = {LOAD: LOADING, SAVE: "saving", RESUME: "resuming"}
_OF_RECORDS = {"setup": LOADING, EVALUATION: "evaluation", PREPARATION: "preparation",
               EARLIER_PREPARATION: "preparation"}


def describe_course(log: Log, blocks: Sequence[NamedStretch]) -> CycleInfo:
    """All that a script did by phases, in the order in which they came first: loading, the first step, steady steps,
    evaluation, saving, resuming, each with the most that the device and the host held. Times are unknown: they depend
    on disks too.
    """
    parts: list[tuple[str, int, PhaseRecord]] = [
        (_name_record(record, log.steps), record.first_call, record) for record in log.phases]
    outermost: list[NamedStretch] = []
    for block in sorted(blocks, key=lambda block: block.opened):
        if not outermost or block.closed > outermost[-1].closed:
            outermost.append(block)
        name = outermost[-1].name if outermost[-1].name in _OF_BLOCKS else block.name
        if name in _OF_BLOCKS:  # also what computes nothing, as a file that is written
            record = PhaseRecord(NO_STEP, "forward", block.stop, block.stop, end_event=block.event, block=name,
                                 host_allocated_bytes=block.host_allocated_bytes,
                                 host_peak_bytes=block.host_peak_bytes, allocated_bytes=block.allocated_bytes,
                                 peak_allocated_bytes=block.allocated_bytes)
            parts.append((_OF_BLOCKS[name], block.stop, record))
    parts.sort(key=lambda part: part[1])
    found: defaultdict[str, list[PhaseRecord]] = defaultdict(list)
    for name, _, record in parts:
        found[name].append(record)
    phases = []
    for name, records in found.items():
        calls = [call for call in log.outer_calls
                 if any(record.first_call <= call.position < record.last_call for record in records)]
        steps = {record.step for record in records} if name in (FIRST_STEP, STEADY) else set()
        times = len(steps) or sum(block.name == records[0].block for block in outermost) or 1
        phases.append(CyclePhase(
            name, times, len(calls), len(steps), None, None, records[-1].allocated_bytes,
            max(record.peak_allocated_bytes for record in records), None, None, None, None,
            records[-1].host_allocated_bytes, max(record.host_peak_bytes for record in records)))
    return CycleInfo(0, log.steps, tuple(phases), None, None, None, None)


def _name_record(record: PhaseRecord, steps: int) -> str:
    if record.block in _OF_BLOCKS:
        return _OF_BLOCKS[record.block]
    if record.phase in _OF_RECORDS:
        return _OF_RECORDS[record.phase]
    return FIRST_STEP if record.step == 0 else STEADY if record.step < steps else AFTERWARDS


def _describe(log: Log, number: int, cycle: Cycle, timer: _PhaseTimer,
              calls: Sequence[OuterCall]) -> CycleInfo:
    parts: defaultdict[str, list[PhasePart]] = defaultdict(list)
    for part in cycle.parts:
        parts[part.name].append(part)
    phases = [_describe_phase(log, name, own, timer, calls) for name, own in parts.items()]
    rolled = [part for part in cycle.parts if part.name == ROLLOUT]
    rollouts = [passes for part in rolled if (passes := _list_within(calls, part))]
    samples: int | None
    if rolled and not rollouts:
        samples, generated = _count_answers(log, rolled)
    elif rollouts:
        samples = add_quantities([passes[0].samples for passes in rollouts])
        own = [call for passes in rollouts for call in passes if call.module == passes[0].module]
        generated = None if any(call.tokens is None for call in own) else add_quantities([c.samples for c in own])
    else:
        generated = None
        samples = min([phase.samples for phase in phases if phase.steps and phase.samples is not None], default=None)
    seconds, low_high = timer.time([part.calls for part in cycle.parts])
    return CycleInfo(number, cycle.steps, tuple(phases), samples, generated, seconds, low_high,
                     _list_held(log, cycle.parts[-1].end_event))


def _count_answers(log: Log, parts: Sequence[PhasePart]) -> tuple[int | None, int | None]:
    """Answers and their tokens, of an engine that a stand-in took the place of; None where nothing tells them."""
    given = [signature.named_arguments() for part in parts for i in part.calls
             if str((signature := log.call_slots.signatures[i]).op).startswith(SAMPLED)]
    return (sum(one["samples"] for one in given), sum(one["tokens"] for one in given)) if given else (None, None)


def _describe_phase(log: Log, name: str, parts: Sequence[PhasePart], timer: _PhaseTimer,
                    calls: Sequence[OuterCall]) -> CyclePhase:
    passes = [call for part in parts for call in _list_within(calls, part)]
    by_module: defaultdict[int, list[OuterCall]] = defaultdict(list)
    for call in passes:
        by_module[call.module].append(call)
    fewest = min(by_module.values(), key=lambda own: sum(call.samples or 0 for call in own), default=[])
    seconds, low_high = timer.time([part.calls for part in parts])
    # operators without a formula are listed in `Profile.uncounted`
    counts = [count_call(log.call_slots.signatures[i]) for part in parts for i in part.calls]
    return CyclePhase(
        name, len(parts), len(passes),
        sum(part.steps for part in parts),
        add_quantities([call.samples for call in fewest]) if fewest else None,
        add_quantities([call.tokens for call in fewest]) if fewest else None,
        parts[-1].allocated_bytes, max(part.peak_bytes for part in parts),
        sum(count.flops for count in counts if count is not None), timer.count_kernels([part.calls for part in parts]),
        seconds, low_high)


def _list_within(calls: Iterable[OuterCall], part: PhasePart) -> list[OuterCall]:
    return [call for call in calls if part.calls.start <= call.position < part.calls.stop]


def _list_held(log: Log, event: int) -> dict[str, int]:
    ends = forward_ends(log)
    held: Counter[str] = Counter()
    for lifetime in alive_at(log, event):
        held[category_of(lifetime, log, ends)] += lifetime.block_bytes
    return {category: nbytes for category, nbytes in held.most_common() if nbytes}


class _PhaseTimer:
    """Times stretches of a log, each on a device that is idle when it begins, its kernels one after the other."""

    def __init__(self, log: Log, device: DeviceSpec) -> None:
        self.log = log
        latency = Latency(log, device, tells=False)
        self.timer = latency.timer
        try:
            latency.annotate()
            self.is_known = True
        except UnknownTimeError:
            self.is_known = False

    def time(self, parts: Sequence[range]) -> tuple[float | None, tuple[float, float] | None]:
        """Seconds with their range; None where the time of a call is not known."""
        if not self.is_known:
            return None, None
        numbers = [self._list_numbers(part) for part in parts]

        def run(timed: Sequence[TimedCall]) -> float:
            clocks = [FreeAt().after(*[timed[number].work for number in part]) for part in numbers]
            return sum(max(clock) for clock in clocks) / PICOSECONDS

        errors = {True: ErrorSum(), False: ErrorSum()}  # of what communicates, and of the rest
        for number, count in Counter([number for part in numbers for number in part]).items():
            timed = self.timer.timed[number]
            if timed.kernel.kernels:
                signature = timed.signature
                key = signature.op, tuple(map(id, signature.inputs)), tuple(map(id, signature.outputs))
                errors[timed.kind == COMMUNICATION].add(key, count, timed.kernel.seconds, timed.kernel.spread)
        seconds = run(self.timer.timed)
        at_pace: Callable[[Pace], float] = lambda pace: run(self.timer.at_pace(pace))  # noqa: E731
        return seconds, range_at_paces(seconds, self.timer.host.host.spread, errors[False], errors[True], at_pace)

    def count_kernels(self, parts: Sequence[range]) -> int | None:
        if not self.is_known:
            return None
        return sum(self.timer.timed[number].kernel.kernels for part in parts for number in self._list_numbers(part))

    def _list_numbers(self, part: range) -> list[int]:
        return [self._number(self.log.calls[index]) for index in part]

    def _number(self, call: OpCall) -> int:
        # the host dispatches what is in no step as it does a forward pass
        return self.timer.number(call if call.step != NO_STEP else replace(call, phase="forward"))
