"""Compiled code: the host's pace beside its kernels, and what bounds the kernels that TorchInductor generates.

What entering a graph takes is measured on the machine at hand, on CPU, with tensors of 4 elements, so that what is
timed is not arithmetic: compiled functions of few and of many parameters. What a graph's program takes for a generated
kernel and for another one, beside the driver's launch (``fitted/host.json``), is fitted to the host's time of the
compiled steps of ``benchmarks/truth/compiled.json``, of each model in proportion to the eager step, since machines
differ. What launching a CUDA graph takes is NVIDIA's figure for one without branches on Ampere and later, 2.5
microseconds ("Constant Time Launch for Straight-Line CUDA Graphs and Other Performance Enhancements", its technical
blog, 2024).

Kernels are those of ``benchmarks/truth/kernels/generated.csv.gz``: training steps of seven models on one H200, which no
other fit has. Rates, floors and latencies are those of the device's other kernels that memory bounds. Five kernels of
float8 steps of an eighth (``titan8b``) tell what writing transposed copies element by element takes, and dividing in
float64, for which all other constants stand as they are.

``python -m benchmarks.calibration.inductor`` writes ``fitted/inductor.json``; it takes about three minutes and needs a
C++ compiler. With ``kernels`` the pace stays as it was.
"""
from __future__ import annotations

import dataclasses
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time.estimate import read_fitted
from analyzer.hardware.kernel_time.generated import FAMILY, generated_time
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.profilers.call_sequence import CallTimer
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.record.log import Log
from benchmarks.accuracy.compiled_measured import Row, predict
from benchmarks.page import known
from benchmarks.truth.table import read_rows, read_runs, rounded, write_constants

from .memory_bound_fit import Bounds, Constants, descend

FEW, MANY = 4, 36  #: parameters
RUNS, CALLS = 100, 20
#: NVIDIA's figure, see above.
GRAPH_LAUNCH_SECONDS = 2.5e-6
#: Of a random number: ten rounds of Philox (``n_rounds`` of triton/language/random.py), of which each takes the low and
#: the high half of two products, four exclusive ors and two sums (``philox_impl``); of the four numbers one is used.
RANDOM_INSTRUCTIONS = 100.0
_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
HOST_PAIRS: dict[str, str] = _TABLE["host pairs"]  #: compiled steps and the eager ones of the same models
#: What stands at the start, least and most. Of kernels: instructions of an element of a loop, of each function that it
#: computes, and of one in a kernel that goes over rows and columns at once; latencies of memory until a kernel is under
#: way. Those of float8 steps alone come after all others.
HOST_BOUNDS, BOUNDS, FLOAT8_BOUNDS = (cast(Bounds, _TABLE[kind]) for kind in ("host", "kernels", "float8"))


def seconds_of(function: Callable[[], object]) -> float:
    """Processor seconds of one call in the shortest of many short runs, so that what else is running does not count."""
    for _ in range(3 * CALLS):
        function()
    runs = []
    for _ in range(RUNS):
        begin = time.thread_time()
        for _ in range(CALLS):
            function()
        runs.append((time.thread_time() - begin) / CALLS)
    return min(runs)


class ManyParameters(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(2, 2), requires_grad=False) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part
        return x


def measure_entry() -> dict[str, float]:  # seconds of entering a graph, and of each tensor that it is given
    def module(count: int) -> float:
        torch._dynamo.reset()
        model = torch.compile(ManyParameters(count))
        return seconds_of(lambda: model(x))

    x = torch.rand(2, 2)
    with torch.no_grad():
        seconds = {count: module(count) for count in (FEW, MANY)}
    tensor = (seconds[MANY] - seconds[FEW]) / (MANY - FEW)
    return {"graph_seconds": seconds[FEW] - FEW * tensor, "tensor_seconds": tensor}


class HostRun(NamedTuple):
    """A measured step of a compiled model: the host's seconds, how many times as long as predicted the host takes for
    the eager step, its predicted seconds beside what a graph's calls take, and how many calls these are.
    """

    model: str
    seconds: float
    pace: float
    rest: float
    kernels: int
    externs: int

    def predict(self, kernel_seconds: float, extern_seconds: float) -> float:
        return self.pace * (self.rest + self.kernels * kernel_seconds + self.externs * extern_seconds)


def count_host(row: Row, entry: Constants) -> tuple[float, int, int]:
    """The host's seconds for a step beside its graphs' calls, their generated kernels, and their other calls."""
    logs: list[Log] = []
    predict(row, logs)
    constants = {**entry, "kernel_seconds": 0.0, "extern_seconds": 0.0}
    timer = CallTimer(logs[-1], dataclasses.replace(find_device(DEVICE), calibration={FAMILY: constants}))
    seconds, counts = 0.0, [0, 0]
    for tally in logs[-1].tallies():
        if tally.step == logs[-1].steps - 1:
            seconds += tally.number * timer.time(tally.call).work.host / PICOSECONDS
            if tally.call.signature.launch is not None:
                counts[isinstance(tally.call.signature.op, FusedKernel)] += tally.number
    return seconds, counts[True], counts[False]


def read_host_runs(entry: Constants) -> list[HostRun]:
    rows = {row.id: row for row in read_runs("compiled", Row)}
    found = []
    for name, eager in HOST_PAIRS.items():
        rest, kernels, externs = count_host(rows[name], entry)
        pace = rows[eager].host_ms / 1e3 / count_host(rows[eager], entry)[0]
        found.append(HostRun(name.partition("/")[0], rows[name].host_ms / 1e3, pace, rest, kernels, externs))
    return found


def fit_host(runs: Sequence[HostRun]) -> Constants:
    def loss(constants: Constants) -> float:
        return sum(math.log(run.predict(**constants) / run.seconds) ** 2 for run in runs)

    return descend(loss, HOST_BOUNDS, {}, rounds=40)


def describe_host(runs: Sequence[HostRun]) -> str:  # each model with the constants that the others tell
    errors = {run.model: run.predict(**fit_host([other for other in runs if other is not run])) / run.seconds - 1
              for run in runs}
    return "host of models left out: " + ", ".join(f"{model} {error:+.0%}" for model, error in errors.items())


# ---- generated kernels

FUNCTIONS = ("erf", "exp", "sine", "online", "variance", "column_variance", "atomic", "double")
FLOAT8_CASES = "titan8b"
DEVICE = "h200"


class Generated(NamedTuple):  # a kernel that was measured
    model: str
    kind: str
    elements: int
    reduced: int
    nbytes: int
    again: int
    functions: dict[str, int]  # evaluations for each element of the loops
    scattered: int
    launches: int
    seconds: float

    def predict(self, device: DeviceSpec, constants: Constants) -> float:
        instructions = sum(constants[f"{name}_instructions"] * n for name, n in self.functions.items())
        time = generated_time(self.kind, self.elements, self.reduced, self.nbytes, self.again,
                              instructions * self.elements * self.reduced, device, self.scattered)
        return known(time).seconds


@cache
def read_generated(is_float8: bool = False) -> tuple[Generated, ...]:
    return tuple(Generated(row["case"].partition("/")[0], row["kind"], int(row["elements"]), int(row["reduced"]),
                           int(row["nbytes"]), int(row["again"]), {name: int(row[name]) for name in FUNCTIONS},
                           int(row["scattered"]), int(row["launches"]), float(row["us"]) * 1e-6)
                 for row in read_rows("generated") if row["case"].startswith(FLOAT8_CASES) == is_float8)


def calibrated(constants: Constants) -> DeviceSpec:
    return dataclasses.replace(find_device(DEVICE), calibration={FAMILY: constants})


def fit(kernels: Sequence[Generated]) -> Constants:
    """The constants that make the errors of all models' kernels least, each model's as heavy as another's. Of a model
    the kernels count by the root of their seconds; errors beyond a half count no more (what reads memory out of order).
    """
    def weight(kernel: Generated) -> float:
        return math.sqrt(kernel.launches * kernel.seconds)

    totals: Counter[str] = Counter()
    for kernel in kernels:
        totals[kernel.model] += weight(kernel)  # type: ignore[assignment]

    def loss(constants: Constants) -> float:
        device = calibrated(constants)
        return sum(weight(kernel) / totals[kernel.model]
                   * min(abs(math.log(kernel.predict(device, constants) / kernel.seconds)), 0.5) for kernel in kernels)

    of_float8 = {name: usual for name, (usual, *_) in FLOAT8_BOUNDS.items()}  # which these kernels do not have
    return descend(loss, BOUNDS, {"kernel_spread": 1.0, **of_float8}, rounds=12)


def fit_float8(kernels: Sequence[Generated], constants: Constants) -> Constants:
    """The constants of transposed copies and of float64, beside those of all other kernels."""
    def loss(trial: Constants) -> float:
        device = calibrated(trial)
        return sum(abs(math.log(kernel.predict(device, trial) / kernel.seconds)) for kernel in kernels)

    return descend(loss, FLOAT8_BOUNDS, constants, rounds=20)


def describe_float8(constants: Constants) -> str:  # each kernel by what the other ones tell
    kernels, errors = read_generated(True), []
    for kernel in kernels:
        found = fit_float8([other for other in kernels if other is not kernel], constants)
        errors.append(f"{kernel.predict(calibrated(found), found) / kernel.seconds - 1:+.0%}")
    return f"kernels of float8 steps left out one at a time: {', '.join(errors)}"


@cache
def leave_models_out() -> tuple[tuple[Generated, float], ...]:
    """Each kernel with its seconds by constants that the others' models are fitted to."""
    found = []
    for model in dict.fromkeys(kernel.model for kernel in read_generated()):
        constants = fit([kernel for kernel in read_generated() if kernel.model != model])
        device = calibrated(constants)
        found += [(kernel, kernel.predict(device, constants)) for kernel in read_generated() if kernel.model == model]
    return tuple(found)


def find_spread() -> float:
    """What kernels stay within that take nine tenths of the seconds of all kernels, their models left out."""
    errors = sorted((max(predicted / kernel.seconds, kernel.seconds / predicted) - 1, kernel.launches * kernel.seconds)
                    for kernel, predicted in leave_models_out())
    total, sums = sum(seconds for _, seconds in errors), itertools.accumulate(seconds for _, seconds in errors)
    return next(error for (error, _), reached in zip(errors, sums) if reached >= 0.9 * total)


def cross_validate() -> Iterator[tuple[str, str, str, float, float, float, float | None]]:
    """Kernels with their model left out: family, device, scheme, measured, predicted, spread and roofline."""
    spread, bandwidth = find_spread(), known(find_device(DEVICE).memory_bandwidth)
    for kernel, predicted in leave_models_out():
        yield "generated", DEVICE, "fold", kernel.seconds, predicted, spread, kernel.nbytes / bandwidth


def describe_models() -> str:
    found = leave_models_out()
    parts = []
    for model in dict.fromkeys(kernel.model for kernel, _ in found):
        own = [(kernel, predicted) for kernel, predicted in found if kernel.model == model]
        error = statistics.median(abs(predicted / kernel.seconds - 1) for kernel, predicted in own)
        total = (sum(kernel.launches * predicted for kernel, predicted in own)
                 / sum(kernel.launches * kernel.seconds for kernel, _ in own))
        parts.append(f"{model} {error:.1%}, sum {total - 1:+.1%}")
    error = statistics.median(abs(predicted / kernel.seconds - 1) for kernel, predicted in found)
    return f"kernels of models left out one at a time: median {error:.1%} ({'; '.join(parts)})"


def main() -> None:
    torch.set_num_threads(1)
    before = read_fitted(FAMILY)
    usual = fit(read_generated())
    kernels = {**fit_float8(read_generated(True), usual), "kernel_spread": find_spread(),
               "random_instructions": RANDOM_INSTRUCTIONS}
    if "kernels" in sys.argv:
        pace = {name: value for name, value in before["generic"].items() if name not in kernels}
        machine, host = before["provenance"]["machine"], before["provenance"]["host"]
    else:
        entry = measure_entry()
        runs = read_host_runs(entry)
        pace = {**entry, **fit_host(runs), "graph_launch_seconds": GRAPH_LAUNCH_SECONDS, "spread": 1.0}
        machine = f"{platform.machine()}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
        host = describe_host(runs)
    values = rounded({**pace, **kernels})
    write_constants(FAMILY, {
        "data": "entering a graph: timed on the machine that wrote this file; a graph's calls: "
                "benchmarks/truth/compiled.json; kernels: benchmarks/truth/kernels/generated.csv.gz; both measured on "
                "one H200 for this project",
        "licence": "none needed; that of this project",
        "note": f"a spread of 1: another host may be twice as fast or as slow; {describe_models()}; "
                f"{describe_float8(usual)}",
        "host": host, "machine": machine}, values)
    print(json.dumps(values), host, describe_models(), describe_float8(usual))


if __name__ == "__main__":
    main()
