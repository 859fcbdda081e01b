"""Seconds of a step on a device: kernels by their models, launched by a host at its own pace."""
from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from analyzer.hardware import DeviceSpec
from analyzer.hardware.host_spec import host_of
from analyzer.hardware.kernel_time.estimate import BOUNDS, KernelTime, find_range
from analyzer.record.call_table import CallKind, CallTable
from analyzer.record.log import Log, PlacedPart
from analyzer.record.op_call import OpCall
from analyzer.record.process_group import communicates

from .annotation import WAYS, Annotation, operator_key, sum_seconds
from .host_time import HostTime
from .kernel_time.call import kernel_time
from .kernel_time.registry import find_rule
from .schedule import PICOSECONDS, Clock, Stretch, Work

#: What a step's seconds are spent on: the first is the device's waiting for the host, the others are of kernels.
BOUND_FIELDS = tuple(f"{bound}_seconds" for bound in ("launch", *BOUNDS))


def call_seconds(call: OpCall, device: DeviceSpec) -> float | None:
    """Seconds of one call's kernels on ``device``; 0.0 for a view, None where they are not known."""
    time = kernel_time(call, device)
    return None if time is None else time.seconds


class _UnknownTimeError(Exception):
    """There is a call whose time is not known."""


class _Timed(NamedTuple):
    work: Work
    kernel: KernelTime


def make_latency_profiler(device: DeviceSpec) -> Callable[[Log], Annotation]:
    """A profiler of seconds on ``device``.

    ``seconds`` of phases and of the step are wall time: until the device has done what was launched, on a device that
    is idle when the step begins. Those of nodes, modules and operators are of their kernels alone, and add up to
    ``kernel_seconds``; ``launch_seconds`` are those in which the device waits for the host. Where a call's time is not
    known nothing is said: a part of a sum is no answer.
    """
    def profile_latency(log: Log) -> Annotation:
        timer = _Timer(log, device)
        try:
            return timer.run()
        except _UnknownTimeError:
            return Annotation()

    return profile_latency


class _Timer:
    """The clock of each step of a log."""

    def __init__(self, log: Log, device: DeviceSpec) -> None:
        self.log, self.device = log, device
        self.host = HostTime(host_of(device), log)
        self.gap = self.host.host.gap_seconds
        self.is_host = device.kind == "cpu"
        self._alike: dict[tuple[object, str, bool, bool], _Timed] = {}
        self._works: dict[CallKind, Work] = {}
        self._stretches: dict[tuple[int, int, int], Stretch] = {}

    def time(self, call: OpCall) -> _Timed:
        """What the host and the device do for a call. Raises _UnknownTimeError."""
        key = call.signature, call.phase, call.recomputed, bool(call.outputs) and set(call.outputs) <= set(call.inputs)
        found = self._alike.get(key)
        if found is None:
            kernel = kernel_time(call, self.device, self.log)
            if kernel is None:
                raise _UnknownTimeError
            host = self.host.picoseconds(call, 0 if self.is_host else kernel.kernels)
            notice = self.host.notice(call)
            device = round((kernel.seconds + kernel.kernels * self.gap) * PICOSECONDS)
            work = Work(host + device, 0) if self.is_host else Work(host, device, notice is not None, notice or 0)
            # what rows and phases add up is whole picoseconds, too
            seconds = round(kernel.seconds * PICOSECONDS) / PICOSECONDS
            kernel = KernelTime(seconds, kernel.spread, kernel.bound, kernel.kernels)
            found = self._alike[key] = _Timed(work, kernel)
        return found

    def works(self, table: CallTable, places: Sequence[int]) -> Iterator[Work]:
        """The work of each call at ``places``; one of each kind is made. Raises _UnknownTimeError."""
        works = self._works
        for kind, place in zip(table.kinds_at(places), places):
            work = works.get(kind)
            if work is None:
                work = works[kind] = self.time(table[place]).work
            yield work

    def run(self) -> Annotation:
        last = self.log.steps - 1
        out = Annotation(self._fill_rows)
        ends = self._find_ends()
        spent, spreads = self._sum_kernels()
        for (step, phase), seconds in ends.items():
            out.phases[step, phase].update(_divide(seconds, spent[step, phase]))
        steady = {phase: row["seconds"] for (step, phase), row in out.phases.items() if step == last}
        kernel_seconds = sum(out.phases[last, phase]["kernel_seconds"] for phase in steady)
        out.totals = {**sum_seconds(steady), "kernel_seconds": kernel_seconds,
                      "step_seconds_range": self._find_range(sum(steady.values()), kernel_seconds, spreads)}
        return out

    def _find_ends(self) -> dict[tuple[int, str], float]:
        """Wall seconds of each phase of each step. A step begins on an idle device; a phase ends when the device has
        done what came before its end.
        """
        phases, table = self.log.phases, self.log.call_slots
        sums: defaultdict[tuple[int, str], int] = defaultdict(int)
        parts = deque(self.log.placed_parts())
        clock, step, place = Clock(), -1, 0
        for i, record in enumerate(phases):
            if record.step != step:
                clock, step = Clock(), record.step
            start = max(clock)
            end = phases[i + 1].first_call if i + 1 < len(phases) else len(table)
            while parts and parts[0].first_call < end:
                part = parts.popleft()
                clock = clock.after_all(self.works(table, table.written_places(place, part.first_call)))
                clock, place = self._stretch(part).end(clock), part.first_call
            clock, place = clock.after_all(self.works(table, table.written_places(place, end))), end
            sums[step, record.phase] += max(clock) - start
        return {key: picoseconds / PICOSECONDS for key, picoseconds in sums.items()}

    def _stretch(self, part: PlacedPart) -> Stretch:
        key = id(part.segment), part.start, part.stop
        found = self._stretches.get(key)
        if found is None:
            places = part.segment.places(part.start, part.stop, self.log)
            found = self._stretches[key] = Stretch().then_all(self.works(*places))
        return found

    def _sum_kernels(self) -> tuple[dict[tuple[int, str], Counter[str]], list[float]]:
        """Of each phase of each step, the picoseconds of kernels by what bounds them; of the last step, by family of
        kernels, how far nine in ten measured times may be from the prediction, in seconds.
        """
        last = self.log.steps - 1
        sums: dict[tuple[int, str], Counter[str]] = {(r.step, r.phase): Counter() for r in self.log.phases}
        errors: defaultdict[object, int] = defaultdict(int)
        for step, call, _, number in self.log.tallies():
            kernel = self.time(call).kernel
            if kernel.kernels:
                sums[step, call.phase][kernel.bound] += number * round(kernel.seconds * PICOSECONDS)
                if step == last:
                    errors[find_rule(call.signature.op)] += number * round(
                        kernel.seconds * kernel.spread * PICOSECONDS)
        return sums, [error / PICOSECONDS for error in errors.values()]

    def _find_range(self, wall: float, kernels: float, errors: list[float]) -> tuple[float, float]:
        """Low and high seconds of a step: errors of one family of kernels go together, those of families do not."""
        waiting = max(0.0, wall - kernels)
        error = math.sqrt(math.fsum(e * e for e in errors) + (waiting * self.host.host.spread) ** 2)
        return find_range(wall, error)

    def _fill_rows(self, out: Annotation) -> None:
        log = self.log
        out.start_rows(log, dict.fromkeys(("fwd_seconds", "bwd_seconds", "recompute_seconds", "error_seconds"), 0.0))
        for i in range(len(log.modules)):
            out.modules[i].update(dict.fromkeys(BOUND_FIELDS, 0.0))
        spent: defaultdict[int, Counter[str]] = defaultdict(Counter)  # of nodes, in picoseconds
        clock = Clock()
        for index, call in enumerate(log.calls):
            if call.step != log.steps - 1:
                continue
            work, kernel = self.time(call)
            if communicates(call.signature):
                out.communication[index]["seconds"] = kernel.seconds
            before, clock = clock.device, clock.after(work)
            waited = clock.device - before - work.device
            error = kernel.seconds * kernel.spread
            out.add(out.operators, operator_key(call), "seconds", kernel.seconds)
            out.add(out.operators, operator_key(call), "error_seconds", error)
            way = WAYS.get(call.phase)
            if way is None:
                continue
            out.add_where(call, f"{way}_seconds", kernel.seconds)
            out.add_where(call, "error_seconds", error)
            if call.recomputed:
                out.add_where(call, "recompute_seconds", kernel.seconds)
            out.add(out.modules, call.module, f"{kernel.bound}_seconds", kernel.seconds)
            out.add(out.modules, call.module, "launch_seconds", waited / PICOSECONDS)
            spent[call.node].update({"launch": waited, kernel.bound: work.device})
        for node, parts in spent.items():
            if node >= 0 and any(parts.values()):
                out.nodes[node]["bound"] = max(parts, key=lambda bound: parts[bound])


def _divide(wall: float, kernels: Counter[str]) -> dict[str, float | str | None]:
    """The seconds of a phase, and what they are spent on: where kernels ran all the time, nothing is left for the
    launches.
    """
    total = sum(kernels.values()) / PICOSECONDS
    parts = {f"{bound}_seconds": picoseconds / PICOSECONDS for bound, picoseconds in kernels.items()}
    return {"seconds": wall, "kernel_seconds": total, **dict.fromkeys(BOUND_FIELDS, 0.0), **parts,
            "launch_seconds": max(0.0, wall - total)}
