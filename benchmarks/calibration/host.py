"""Fits the pace of the host: what Python, the dispatcher, autograd and the driver take for each call of a step.

    python -m benchmarks.calibration.host

Data: wall times by phase of the 24 steps of ``benchmarks/truth/latency.json`` (measured for this project on one H200;
median of seven, CUDA events). The kernels' times are those that the models predict, so that what is fitted is what a
prediction adds to them. Loss: mean of |log(predicted / measured)| of whole steps, and half of that of their phases;
Nelder-Mead from round numbers. ``synchronize_seconds`` is no part of the data (no step waits): one launch. Cross
validation leaves out all steps of a model at a time; `find_spread` says how ``spread`` follows from it.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

import analyzer.hardware.kernel_time as kernel_time
from analyzer.hardware.host_spec import HostSpec
from benchmarks.calibration.step_trace import StepTrace, trace
from benchmarks.measured_step import h200_steps

PATH = Path(kernel_time.__file__).parent / "fitted" / "host.json"
START = {
    "module_seconds": 20e-6, "forward_seconds": 10e-6, "gradient_seconds": 1e-6, "backward_seconds": 10e-6,
    "update_seconds": 10e-6, "list_tensor_seconds": 1.5e-6, "library_seconds": 10e-6, "checkpoint_seconds": 10e-6,
    "launch_seconds": 8e-6, "gap_seconds": 1e-6}
NAMES = tuple(START)


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


def fit(traces: Sequence[StepTrace]) -> HostSpec:
    """The host with the least error over steps."""
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
def hosts_without() -> Mapping[str, HostSpec]:
    """By model, the host that is fitted to the steps of all other models."""
    models = sorted({traced.step.model for traced in traces()})
    return {model: fit([traced for traced in traces() if traced.step.model != model]) for model in models}


def left_out_walls() -> list[tuple[StepTrace, float]]:
    """Each step with its wall seconds on the host that was fitted without its model."""
    found = []
    for traced in traces():
        walls = traced.wall_seconds(hosts_without()[traced.step.model])
        found.append((traced, sum(walls[phase] for phase in traced.step.phases)))
    return found


def find_spread() -> float:
    """The least part of the predicted waits that has to be added or taken away, so that nine in ten of the left out
    steps are met.
    """
    needed = []
    for traced, wall in left_out_walls():
        kernels = sum(call.seconds for phase in traced.step.phases for call in traced.phases[phase])
        ratio = max(wall / traced.step.seconds, traced.step.seconds / wall)
        waits = (wall - kernels) / wall
        needed.append((ratio - 1) / waits if waits > 0.1 else 0.0)  # of others the kernels' errors say more
    return sorted(needed)[math.ceil(0.9 * len(needed)) - 1]


def main() -> None:
    host = dataclasses.replace(fit(traces()), spread=find_spread())
    errors = [abs(wall / traced.step.seconds - 1) for traced, wall in left_out_walls()]
    for traced, wall in left_out_walls():
        print(f"{traced.step.id:46} {wall * 1e3:8.2f} ms, measured {traced.step.seconds * 1e3:8.2f}, "
              f"{wall / traced.step.seconds - 1:+.1%}")
    print(f"wall time of steps of models left out: median {statistics.median(errors):.1%}, "
          f"nine in ten {sorted(errors)[math.ceil(0.9 * len(errors)) - 1]:.1%}")
    PATH.write_text(json.dumps({
        "provenance": {
            "command": "python -m benchmarks.calibration.host",
            "data": "wall times of benchmarks/truth/latency.json: 24 steps on one H200, measured for this project",
            "licence": "that of this project", "date": date.today().isoformat(), "torch": str(torch.__version__),
            "note": f"models left out one at a time: wall time median {statistics.median(errors):.1%}"},
        "generic": {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(host).items()},
        "architectures": {}, "devices": {}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
