"""Fits the pace of the host: what Python, the dispatcher, autograd and the driver take for each call of a step.

    python -m benchmarks.calibration.host

Data: wall times by phase of the 24 steps of ``benchmarks/truth/latency.json`` (measured for this project on one H200;
median of seven, CUDA events). The kernels' times are those that the models predict, so that what is fitted is what a
prediction adds to them. Loss: mean of |log(predicted / measured)| of whole steps, and half of that of their phases;
Nelder-Mead from round numbers. ``synchronize_seconds`` is no part of the data (no step waits): one launch. Cross
validation leaves out all steps of a model at a time. ``measured_spread`` is how far the pace of the host that was
measured is off on models that were left out; ``spread``, that of a host that was not measured, has in it how far the
hosts of ``benchmarks/truth/kernels/fp32_ops.csv.gz`` (github.com/sitar-lab/NeuSight, MIT) differ in one call.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

import torch

from analyzer.hardware import find_device
from analyzer.hardware.cluster_spec import HostSpec
from analyzer.profilers.host_time import (
    add_launches,
    count_convolutions,
    count_listed,
    find_paces,
    is_repacked,
    waits_for_device,
)
from analyzer.profilers.kernel_time import kernel_time
from analyzer.profilers.schedule import PICOSECONDS, FreeAt, Task
from analyzer.record.log import Log
from benchmarks.accuracy.measured_step import MeasuredStep, h200_steps
from benchmarks.page import keep, known
from benchmarks.truth.table import rounded, write_constants

from .matmul_cases import all_cases

START = {"module_seconds": 20e-6, "forward_seconds": 10e-6, "gradient_seconds": 1e-6, "backward_seconds": 10e-6,
         "update_seconds": 10e-6, "list_tensor_seconds": 1.5e-6, "library_seconds": 10e-6, "checkpoint_seconds": 30e-6,
         "launch_seconds": 8e-6, "gap_seconds": 1e-6}
NAMES = tuple(START)
SMALL_SECONDS = 3e-6  # of a product, by the data sheet
FEWEST = 20  # products that tell of a host
NINE_IN_TEN = 1.645  # standard deviations of a normal distribution


class TracedCall(NamedTuple):
    """One call of the last step: which pace the host has for it, its launches, and seconds of its kernels."""

    pace: str
    kernels: int
    convolutions: int
    tensors: int  #: in lists
    seconds: float
    waits: bool
    packs: bool


@dataclass
class StepTrace:  # the phases of a step, each with its calls, and how many modules its forward pass calls
    step: MeasuredStep
    phases: dict[str, list[TracedCall]]
    module_calls: int
    trains: bool

    def wall_seconds(self, host: HostSpec) -> dict[str, float]:
        """Wall seconds of each phase at a host's pace, as `analyzer.profilers.latency` has them."""
        again = [call for calls in self.phases.values() for call in calls if call.pace == "recompute"]
        paces = find_paces(host, len(self.phases["forward"]), len(again), sum(call.packs for call in again),
                           self.module_calls, self.trains)
        clock = FreeAt()
        found = {}
        for phase, calls in self.phases.items():
            start = max(clock)
            clock = clock.after(*(Task(round(add_launches(host, paces.get(call.pace, host.update_seconds), call.kernels,
                                                          call.convolutions, call.tensors) * PICOSECONDS),
                                       round((call.seconds + call.kernels * host.gap_seconds) * PICOSECONDS),
                                       call.waits, round(host.synchronize_seconds * PICOSECONDS)) for call in calls))
            found[phase] = (max(clock) - start) / PICOSECONDS
        return found


def trace(step: MeasuredStep) -> StepTrace:  # profile a measured step and keep what its host does
    logs: list[Log] = []
    step.profile(profilers={"trace": keep(logs)})
    log, device, phases = logs[-1], find_device(step.device), dict[str, list[TracedCall]]()
    for call in log.calls:
        if call.step == log.steps - 1:
            kernel = known(kernel_time(call, device))
            phases.setdefault(call.phase, []).append(TracedCall(
                "recompute" if call.recomputed else call.phase, kernel.kernels, count_convolutions(call.signature),
                count_listed(call.signature), kernel.seconds, waits_for_device(call.signature),
                is_repacked(call.signature)))
    return StepTrace(step, phases, log.count_module_calls(), "backward" in phases)


def make_host(values: Sequence[float], spread: float = 0.0) -> HostSpec:
    """The host of fitted values, which are multiples of `START`."""
    found = {name: START[name] * float(value) for name, value in zip(NAMES, values)}
    return HostSpec(**found, synchronize_seconds=found["launch_seconds"], spread=spread)


def error_of(traced: StepTrace, host: HostSpec) -> float:
    """|log(predicted / measured)| of a step, and half of its phases' mean."""
    walls = traced.wall_seconds(host)
    measured = traced.step.phases
    phases = [abs(math.log(walls[phase] / seconds)) for phase, seconds in measured.items()]
    whole = math.log(sum(walls[phase] for phase in measured) / traced.step.seconds)
    return abs(whole) + statistics.mean(phases) / 2


def fit(traces: Sequence[StepTrace]) -> HostSpec:  # the host with the least error over steps
    from scipy.optimize import minimize

    def loss(values: Sequence[float]) -> float:
        if min(values) < 0:
            return 100.0 - min(values)
        host = make_host(values)
        return statistics.mean(error_of(traced, host) for traced in traces)

    found = minimize(loss, [1.0] * len(NAMES), method="Nelder-Mead",
                     options={"maxfev": 700, "adaptive": True, "xatol": 0.01, "fatol": 1e-4})
    return make_host(found.x)


@functools.cache
def traces() -> tuple[StepTrace, ...]:
    return tuple(map(trace, h200_steps()))


@functools.cache
def hosts_without() -> Mapping[str, HostSpec]:  # by model, the host that is fitted to the steps of all other models
    models = sorted({traced.step.model for traced in traces()})
    return {model: fit([traced for traced in traces() if traced.step.model != model]) for model in models}


def find_pace(traced: StepTrace, host: HostSpec) -> float | None:
    """How many times as long as a host it would have to take for a step to take as long as was measured; None where
    kernels decide: a tenth more or less, from there or from the host's own pace, moves the step by less than a
    twentieth.
    """
    def wall(factor: float) -> float:
        slower = {name: factor * getattr(host, name) for name in (*NAMES[:-1], "synchronize_seconds")}
        walls = traced.wall_seconds(dataclasses.replace(host, **slower))  # the gap, the last name, is the device's
        return sum(walls[phase] for phase in traced.step.phases)

    low, high = 0.1, 10.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if wall(middle) < traced.step.seconds else (low, middle)
    decides = all(wall(1.1 * pace) >= 1.05 * wall(pace) for pace in (1.0, high / 1.1))
    return high if decides else None


def find_spread() -> float:
    """What nine in ten of the paces that the left out steps would need are within, on the one host that was measured.
    """
    paces = [find_pace(traced, hosts_without()[traced.step.model]) for traced in traces()]
    errors = sorted(abs(math.log(pace)) for pace in paces if pace is not None)
    return math.expm1(errors[math.ceil(0.9 * len(errors)) - 1])


def find_other_hosts() -> dict[str, float]:
    """By device, the seconds from the event before a small batched product to the event after it, on the hosts of
    ``benchmarks/truth/kernels/fp32_ops.csv.gz``: the median over products that the device would do in a few
    microseconds, so the host's.
    """
    found: dict[str, list[float]] = {}
    for case in all_cases():
        if case.clock.endswith("bmm"):
            device = find_device(case.device)
            assert device.memory_bandwidth is not None and device.flops_per_second.fp32 is not None
            nbytes = 4 * case.batch * (case.m * case.n + case.k * (case.m + case.n))
            flops = 2 * case.batch * case.m * case.n * case.k
            if max(nbytes / device.memory_bandwidth, flops / device.flops_per_second.fp32) < SMALL_SECONDS:
                found.setdefault(case.device, []).append(case.seconds)
    return {device: statistics.median(seconds) for device, seconds in found.items() if len(seconds) >= FEWEST}


def find_host_spread() -> float:
    """What nine in ten hosts that were not measured are within: they differ from each other, and the steps on each from
    what is predicted of them.
    """
    between = NINE_IN_TEN * statistics.stdev(map(math.log, find_other_hosts().values()))
    return math.expm1(math.hypot(between, math.log1p(find_spread())))


def main() -> None:
    host = dataclasses.replace(fit(traces()), spread=find_host_spread())
    errors = []
    for traced in traces():
        walls = traced.wall_seconds(hosts_without()[traced.step.model])
        errors.append(abs(sum(walls[phase] for phase in traced.step.phases) / traced.step.seconds - 1))
    write_constants("host", {
        "data": "wall times of benchmarks/truth/latency.json: 24 steps on one H200, measured for this project; how "
                "hosts differ: benchmarks/truth/kernels/fp32_ops.csv.gz (github.com/sitar-lab/NeuSight)",
        "licence": "that of this project; MIT", "date": date.today().isoformat(), "torch": str(torch.__version__),
        "note": f"models left out one at a time: wall time median {statistics.median(errors):.1%}"},
        rounded({**dataclasses.asdict(host), "measured_spread": find_spread()}))


if __name__ == "__main__":
    main()
