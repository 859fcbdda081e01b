"""Seconds of a step, with their range."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.estimate import (
    BOUNDS,
    SLOWEST_OF_HOSTS,
    SLOWEST_RANK,
    ErrorSum,
    find_constants,
    find_range,
    slowdown_of_board,
)
from analyzer.record.call_table import OpCall
from analyzer.record.device_log import find_copied
from analyzer.record.log import Log, Tally
from analyzer.record.process_group import ProcessGroupSpec, communicates
from analyzer.units import format_rate, format_seconds

from .annotation import WAYS, Annotation, operator_key, sum_seconds
from .call_sequence import CallSequence, CallTimer, Pace, TimedCall, UnknownTimeError
from .kernel_time import kernel_time
from .schedule import COMMUNICATION, PICOSECONDS, FreeAt, PhaseTime
from .stream_schedule import KernelRun, find_lanes, schedule_steps, time_phases


def range_at_paces(seconds: float, host_spread: float, compute: ErrorSum, communication: ErrorSum,
                   run: Callable[[Pace], float], on_network: Callable[[float], float] | None = None,
                   slowest: float = 0.0) -> tuple[float, float]:
    """Low and high of a step of ``seconds``, as ``run`` tells at a pace: nine in ten measured steps lie between.
    Host, kernels that compute and those that communicate are off each on its own: the step is run with each at both
    ends of its range, so what hides behind something else does no harm, and what comes to the fore does. A network that
    is assumed may have half its bandwidth or twice, by which the usual ones of one generation differ (`on_network`).
    One rank of a job may compute by ``slowest`` longer than all others, which wait for it (`find_slowest`).
    """
    spreads = {"host": host_spread, "compute": compute.spread, "communication": communication.spread}
    ends = [(run(Pace(**{name: 1 + spread})), run(Pace(**{name: 1 / (1 + spread)})))
            for name, spread in spreads.items() if spread]
    if on_network is not None:
        ends.append((on_network(0.5), on_network(2.0)))
    if slowest:
        ends.append((run(Pace(compute=1 + slowest)), seconds))
    return find_range(seconds, [slower for slower, _ in ends], [faster for _, faster in ends])


#: What a step's seconds are spent on: the first is the device's waiting for the host, the others are of kernels.
BOUND_FIELDS = tuple(f"{bound}_seconds" for bound in ("launch", *BOUNDS))


def find_slowest(log: Log) -> float:
    """How much longer the slowest rank of a job may compute, on one host or on several."""
    world = log.world
    many = world is not None and world.devices_per_host is not None and world.size > world.devices_per_host
    return SLOWEST_OF_HOSTS if many else SLOWEST_RANK


OVERLAP = ("seconds on several streams: communication runs beside computation, which lacks the multiprocessors that it "
           "holds, and all ranks begin at once; kernels that fill the device take turns, and so do collectives over "
           "the same links")


OVERLAP_OF_DEVICES = (
    "seconds on several devices: one thread launches the kernels of all, those of each device run in the order of its "
    "streams, and a copy from one to another waits for both and is waited for by both, over the links that hosts of "
    "the device usually have")


#: Of its power limit, what a device takes in other kernels than products: the mean of five (copy, GELU, sum, softmax,
#: layer norm) on an H200, 508 to 706 W of 700 (``benchmarks/truth/energy.json``).
OTHERS_SHARE = 0.91


#: How an assumption begins that is a figure which a step depends on, and which was not given.
NOT_GIVEN = "not given: "


def find_assumed_network(log: Log, device: DeviceSpec) -> ClusterSpec | None:
    """The usual hosts of a device, where ranks of a job on several of them send each other something and it was not
    said what joins them.
    """
    world = log.world
    if world is None or world.cluster is not None and not is_assumed(world.cluster):
        return None
    cluster = world.cluster or cluster_of(device)
    per_host = world.devices_per_host or cluster.devices_per_host
    crosses = any(len({rank // per_host for rank in group.ranks or ()}) > 1 for group in _list_groups(log))
    return cluster if crosses and is_assumed(cluster) else None


def _list_groups(log: Log) -> list[ProcessGroupSpec]:
    """The groups whose ranks send each other something."""
    groups = [log.group_of(signature) for signature in log.signatures() if communicates(signature)]
    return list({id(group): group for group in groups if group is not None}.values())


def is_assumed(cluster: ClusterSpec) -> bool:
    """Whether the network between hosts is what hosts of the device usually have, and was not given."""
    return cluster.fabric is not None and cluster.fabric.sources.get("bandwidth", "").startswith("assumed")


def with_network(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """A cluster whose hosts are joined by a network of that many times the bandwidth."""
    assert cluster.fabric is not None
    return replace(cluster, fabric=replace(cluster.fabric, bandwidth=factor * cluster.fabric.bandwidth))


def call_seconds(call: OpCall, device: DeviceSpec) -> float | None:
    """Seconds of one call's kernels on ``device``; 0.0 for a view, None where they are not known."""
    time = kernel_time(call, device)
    return None if time is None else time.seconds


def make_latency_profiler(device: DeviceSpec) -> Callable[[Log], Annotation]:
    """A profiler of seconds on ``device``. ``seconds`` of phases and of the step are wall time: until the device has
    done what was launched, on a device that is idle when the step begins. Those of nodes, modules and operators are of
    their kernels alone, and add up to ``kernel_seconds``; ``launch_seconds`` are those in which the device waits for
    the host. ``exposed_comm_seconds`` are those in which it communicates and computes nothing. Where a call's time is
    not known nothing is said: a part of a sum is no answer.
    """
    def profile_latency(log: Log) -> Annotation:
        try:
            return Latency(log, device).annotate()
        except UnknownTimeError:
            return Annotation()

    return profile_latency


class Latency:
    """The seconds of a log on a device; it ``tells`` what it assumes of the network, which takes a schedule more."""

    def __init__(self, log: Log, device: DeviceSpec, *, tells: bool = True) -> None:
        self.log, self.timer, self._tells = log, CallTimer(log, device), tells
        #: where there are several streams: the kernels of the last step, by index of their call
        self._runs: dict[int, KernelRun] | None = None
        self.parts: list[tuple[str, float]] = []  #: and the seconds of each part of its phases, in order

    @property
    def runs(self) -> Mapping[int, KernelRun]:
        """The kernels of the last step by index of their call, where `annotate` put them on several streams."""
        return self._runs or {}

    def exposed_seconds(self, index: int) -> float:
        """In which a call of the last step communicates, and nothing is computed."""
        run = self.runs.get(index)
        return 0.0 if run is None else run.exposed / PICOSECONDS

    def annotate(self) -> Annotation:
        """Raises UnknownTimeError where a call's time is not known."""
        log, last = self.log, self.log.steps - 1
        out = Annotation(self._fill_rows, lambda: find_lanes(self.log, self.timer))
        tallies = [(tally, self.timer.time(tally.call)) for tally in log.tallies()]
        sequence = CallSequence(log, self.timer)
        # all kernels are on one stream, with nothing that waits for them but the calls themselves
        in_turn = self.timer.is_host or not (log.streams or log.others) and not any(map(communicates, log.signatures()))

        def run_timed(timed: list[TimedCall]) -> float:
            if in_turn:
                return sum(time.total for time in time_phases(sequence, timed, last).values()) / PICOSECONDS
            *_, schedule = schedule_steps(sequence, timed, last)
            return schedule.end() / PICOSECONDS

        again = [(tally.number, timed) for tally, timed in tallies if tally.step == last]
        if not self.timer.is_host and (share := self._find_load(again, run_timed)):
            self.timer.sustain(share)
            tallies = [(tally, self.timer.time(tally.call)) for tally, _ in tallies]
        times = time_phases(sequence, self.timer.timed) if in_turn else self._schedule(sequence)
        spent: dict[tuple[int, str], Counter[str]] = {(r.step, r.phase): Counter() for r in log.phases}
        launched: Counter[tuple[int, str]] = Counter()
        for tally, (_, kernel, *_) in tallies:  # picoseconds of kernels by what bounds them
            if kernel.kernels:
                spent[tally.step, tally.call.phase][kernel.bound] += tally.number * round(kernel.seconds * PICOSECONDS)
                launched[tally.step, tally.call.phase] += tally.number * kernel.kernels
        for key, time in times.items():
            out.phases[key].update(_divide(time, spent[key]), kernels=launched[key])
        steady = {phase: row for (step, phase), row in out.phases.items() if step == last}
        if self._runs is not None and len({run.stream for run in self._runs.values()}) > 1:
            out.assumptions.append(OVERLAP_OF_DEVICES if log.others else OVERLAP)
        seconds = math.fsum(time.total for (step, _), time in times.items() if step == last) / PICOSECONDS

        def run(pace: Pace) -> float:
            return run_timed(self.timer.at_pace(pace))

        def run_on(network: float) -> float:
            assert assumed is not None
            return run_timed(self.timer.at_fabric(with_network(assumed, network)))

        waits = not in_turn and any(group.size > 1 for group in _list_groups(log))
        assumed = None if in_turn else find_assumed_network(log, self.timer.device)
        if assumed is not None and self._tells:
            out.assumptions.append(self._tell_network(assumed, seconds, run_on(0.5)))

        def find_step_range() -> tuple[float, float]:
            errors = {True: ErrorSum(), False: ErrorSum()}  # of what communicates, and of the rest
            for tally, timed in tallies:
                if tally.step == last and timed.kernel.kernels:
                    signature = timed.signature  # one operator on the same specs, whatever the process group
                    key = signature.op, tuple(map(id, signature.inputs)), tuple(map(id, signature.outputs))
                    errors[timed.kind == COMMUNICATION].add(key, tally.number, timed.kernel.seconds,
                                                            timed.kernel.spread)
            return range_at_paces(seconds, self.timer.host.host.spread, errors[False], errors[True], run,
                                  None if assumed is None else run_on, find_slowest(log) if waits else 0.0)

        out.find_step_range = find_step_range
        out.totals = {**sum_seconds({phase: row["seconds"] for phase, row in steady.items()}),
                      "kernel_seconds": sum(row["kernel_seconds"] for row in steady.values())}
        if log.others:
            out.totals.update(_sum_by_device([(tally, timed) for tally, timed in tallies if tally.step == last]))
        return out

    def _find_load(self, calls: list[tuple[int, TimedCall]], run: Callable[[list[TimedCall]], float]) -> float:
        """The share of `KernelTime.load_seconds` by which kernels take longer in a training step, which is one of many
        in a row: the clock is what the power limit leaves on the average of the step. An H200 that multiplies runs at
        1,485 MHz in place of 1,980, however short the product, and at 1,867 in a step of products and other kernels
        (``benchmarks/truth/energy.json``).
        """
        more = math.fsum(number * timed.kernel.load_seconds for number, timed in calls)
        if not more or not any(record.phase == "backward" for record in self.log.phases):
            return 0.0
        device, computing = self.timer.device, [call for call in calls if call[1].kind != COMMUNICATION]
        there = len(self.log.devices) * run(self.timer.timed)
        waiting = there - math.fsum(number * timed.kernel.seconds for number, timed in computing)
        left = (1 - find_constants("power", device)["idle_share"]) * max(0.0, waiting)
        left += max(0.0, 1 - OTHERS_SHARE * slowdown_of_board(device)) * math.fsum(
            number * timed.kernel.seconds for number, timed in computing if not timed.kernel.load_seconds)
        return max(0.0, 1 - left / more)

    def _tell_network(self, cluster: ClusterSpec, seconds: float, at_half: float) -> str:
        assert cluster.fabric is not None
        known = None if self.log.world is None else self.log.world.cluster
        name = f"{(known or self.timer.device).name},fabric={cluster.fabric.bandwidth / 1e9:g}e9"
        return (f"{NOT_GIVEN}the network between hosts; {format_rate(cluster.fabric.bandwidth)} of a device is "
                f"{cluster.fabric.sources['bandwidth']}; a step takes {format_seconds(seconds)} with it and "
                f"{format_seconds(at_half)} with half of it; give yours: --cluster {name}, world(cluster={name!r})")

    def _schedule(self, sequence: CallSequence) -> dict[tuple[int, str], PhaseTime]:
        times: dict[tuple[int, str], PhaseTime] = {}
        for schedule in schedule_steps(sequence):
            step = schedule.finish()
            times.update({(step.step, phase): time for phase, time in step.phases.items()})
            if step.step == self.log.steps - 1:
                self._runs = {run.call: run for run in step.runs}
                self.parts = [(phase, time.total / PICOSECONDS) for phase, time in step.parts]
        return times

    def _fill_rows(self, out: Annotation) -> None:
        log = self.log
        out.start_rows(log, dict.fromkeys(("fwd_seconds", "bwd_seconds", "recompute_seconds", "error_seconds",
                                           "exposed_comm_seconds"), 0.0))
        for i in range(len(log.modules)):
            out.modules[i].update(dict.fromkeys(BOUND_FIELDS, 0.0))
        spent: defaultdict[int, Counter[str]] = defaultdict(Counter)  # of nodes, in picoseconds
        clock = FreeAt()
        for index, call in enumerate(log.calls):
            if call.step != log.steps - 1:
                continue
            work, kernel, *_ = self.timer.time(call)
            run, exposed = self.runs.get(index), self.exposed_seconds(index)
            waited = 0 if run is None else run.waited
            if self._runs is None:
                before, clock = clock.device, clock.after(work)
                waited = clock.device - before - work.device
            error = kernel.seconds * kernel.spread
            out.add(out.operators, operator_key(call), "seconds", kernel.seconds)
            out.add(out.operators, operator_key(call), "error_seconds", error)
            if communicates(call.signature):
                start = None if run is None else run.start / PICOSECONDS
                out.communication[index].update(start_seconds=start, seconds=kernel.seconds, exposed_seconds=exposed)
            way = WAYS.get(call.phase)
            if way is None:
                continue
            out.add_where(call, f"{way}_seconds", kernel.seconds)
            out.add_where(call, "error_seconds", error)
            if exposed:
                out.add_where(call, "exposed_comm_seconds", exposed)
            if call.recomputed:
                out.add_where(call, "recompute_seconds", kernel.seconds)
            out.add(out.modules, call.module, f"{kernel.bound}_seconds", kernel.seconds)
            out.add(out.modules, call.module, "launch_seconds", waited / PICOSECONDS)
            spent[call.node].update({"launch": waited, kernel.bound: work.device})
        for node, parts in spent.items():
            if node >= 0 and any(parts.values()):
                out.nodes[node]["bound"] = max(parts, key=lambda bound: parts[bound])


def _sum_by_device(calls: Iterable[tuple[Tally, TimedCall]]) -> dict[str, dict[Any, float]]:
    """Seconds of the kernels of each device, by its name, and of copies, by where from, where to and phase."""
    kernels: defaultdict[str, list[float]] = defaultdict(list)
    copies: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for tally, timed in calls:
        kernels[f"cuda:{timed.place}"].append(tally.number * timed.kernel.seconds)
        if (ends := find_copied(timed.signature)) is not None:
            copies[ends[0], ends[1], tally.call.phase].append(tally.number * timed.kernel.seconds)
    return {name: {key: math.fsum(seconds) for key, seconds in found.items()}
            for name, found in (("device_seconds", kernels), ("copied_seconds", copies))}


def _divide(time: PhaseTime, kernels: Counter[str]) -> dict[str, float | str | None]:
    """The seconds of a phase, and what they are spent on: launches where kernels did not run all the time."""
    total, wall = sum(kernels.values()) / PICOSECONDS, time.total / PICOSECONDS
    parts = {f"{bound}_seconds": picoseconds / PICOSECONDS for bound, picoseconds in kernels.items()}
    idle = max(0.0, wall - total) if time.idle is None else time.idle / PICOSECONDS
    return {"seconds": wall, "kernel_seconds": total, **dict.fromkeys(BOUND_FIELDS, 0.0), **parts,
            "launch_seconds": idle, "exposed_comm_seconds": time.exposed / PICOSECONDS}
