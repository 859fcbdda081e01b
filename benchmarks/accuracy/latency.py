"""How right predicted times are, cross-validated: `python -m benchmarks.accuracy.latency` writes into docs/accuracy.md;
with `kernels` or `steps` that part alone. Steps under `torch.compile` are in `benchmarks.accuracy.compiled`.

No case is predicted with constants that it helped to fit: kernels by folds of shapes and with their device left out
(`benchmarks/calibration`), the steps on the H200 with their model left out of every fit, the host's included. No
constant is fitted to the steps of NeuSight's authors.
"""
from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch

from analyzer import Profile
from analyzer.hardware import DeviceSpec, find_device, roofline_seconds
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.traffic import call_traffic
from analyzer.record.log import Log
from benchmarks.accuracy.measured_step import MeasuredStep, h200_steps, neusight_steps
from benchmarks.calibration import attention, collective, convolution, host, matmul, memory_bound
from benchmarks.page import correlate_ranks, describe_run, keep, markdown, percent, publish, quantile

BARS = {("matrix product", "fold"): 0.09, ("attention", "fold"): 0.12, ("collective", "fold"): 0.12,
        ("fp32 operator", "fold"): 0.12}
LEFT_OUT_BAR = 0.18
FAMILIES = (matmul, attention, memory_bound, convolution, collective)
SCHEMES = {"fold": "shape left out", "device": "device left out"}


Run = TypeVar("Run")


class Judged(NamedTuple):  # a measured time and what was predicted of it without it
    family: str
    device: str
    scheme: str
    measured: float
    predicted: float
    low: float
    high: float
    roofline: float | None

    @property
    def deviation(self) -> float:  # how far the prediction is above what was measured, as a part of it
        return self.predicted / self.measured - 1

    @property
    def error(self) -> float:
        return abs(self.deviation)

    @property
    def is_held(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def width(self) -> float:  # half of the range, as a part of the prediction
        return (self.high - self.low) / 2 / self.predicted


@cache
def judge_kernels() -> tuple[Judged, ...]:  # kernels of all families, in both schemes
    found = []
    for module in FAMILIES:
        for family, device, scheme, measured, predicted, spread, roofline in module.cross_validate():
            found.append(Judged(family, device, scheme, measured, predicted, predicted / (1 + spread),
                                predicted * (1 + spread), roofline))
    return tuple(found)


def describe_errors(cases: Sequence[Judged]) -> list[str]:
    """Of cases: how many, errors, the range, and the roofline's error."""
    rooflines = [abs(case.roofline / case.measured - 1) for case in cases if case.roofline is not None]
    return [f"{len(cases):,}", percent(statistics.median(case.error for case in cases)),
            percent(quantile([case.error for case in cases], 0.9)),
            percent(sum(case.is_held for case in cases) / len(cases)),
            f"± {percent(statistics.median(case.width for case in cases))}",
            percent(statistics.median(rooflines) if rooflines else None)]


ERRORS = ("cases", "median error", "nine in ten", "range holds", "median width", "roofline's median")


def kernel_tables() -> str:  # errors by family and scheme, then by device
    cases = judge_kernels()
    rows, devices = [], []
    for scheme, said in SCHEMES.items():
        for family in dict.fromkeys(case.family for case in cases):
            part = [case for case in cases if (case.family, case.scheme) == (family, scheme)]
            if part:
                bar = BARS.get((family, scheme), LEFT_OUT_BAR)
                rows.append([family, said, percent(bar), *describe_errors(part)])
                devices += [[family, said, device, *describe_errors([c for c in part if c.device == device])[:5]]
                            for device in dict.fromkeys(case.device for case in part)]
        rows.append(["all", said, "", *describe_errors([case for case in cases if case.scheme == scheme])])
    return (f"{markdown(['family', 'predicted with its', 'bar', *ERRORS], rows, 2)}\n\nBy device:\n\n"
            f"{markdown(['family', 'predicted with its', 'device', *ERRORS[:5]], devices, 3, 'accuracy/kernels')}")


# ---- whole steps


class StepResult(NamedTuple):  # a measured step, what was predicted of it, and of its kernels' sum
    step: MeasuredStep
    wall: Judged
    kernels: Judged | None


def roofline_of(log: Log, device: DeviceSpec) -> float | None:
    """Seconds of a step by data sheet alone: the longer of arithmetic and memory, call by call."""
    total = 0.0
    for tally in log.tallies():
        if tally.step == log.steps - 1:
            signature = tally.call.signature
            count, nbytes = count_call(signature), sum(call_traffic(tally.call, tally.storages))
            kinds = [spec.dtype for spec in (*signature.outputs, *signature.inputs) if spec.dtype.is_floating_point]
            seconds = roofline_seconds(count.flops if count else 0, nbytes, kinds[0] if kinds else torch.float32,
                                       device, uses_tensor_cores=bool(count and count.macs),
                                       allow_tf32="convolution" in signature.op.__name__)
            if seconds is None:
                return None
            total += tally.number * seconds
    return total


def h200_without(model: str) -> DeviceSpec:  # the H200 with constants that no step of a model helped to fit
    pace = dataclasses.asdict(host.hosts_without()[model]) | {"spread": host.find_spread()}
    return dataclasses.replace(find_device("h200"), calibration={
        "matmul": matmul.constants_without(model),
        "attention": attention.constants_without(model), "memory_bound": memory_bound.constants_without(model),
        "convolution": convolution.constants_without(model), "host": pace})


def judge_step(step: MeasuredStep, device: DeviceSpec | None = None) -> StepResult:
    """Predict a step on its device, or on a spec that stands for it."""
    logs: list[Log] = []
    p: Profile = (step if device is None else dataclasses.replace(step, device=device)).profile(
        profilers={"roofline": keep(logs)})
    roofline = roofline_of(logs[-1], find_device(step.device))
    assert p.step_seconds is not None and p.kernel_seconds is not None and p.step_seconds_range is not None
    low, high = p.step_seconds_range
    wall = Judged("step", str(step.device), step.model, step.seconds, p.step_seconds, low, high, roofline)
    kernels = None if step.kernel_seconds is None else Judged(
        "kernels", str(step.device), step.model, step.kernel_seconds, p.kernel_seconds, p.kernel_seconds,
        p.kernel_seconds, roofline)
    return StepResult(step, wall, kernels)


@cache
def judge_steps() -> tuple[tuple[StepResult, ...], tuple[StepResult, ...]]:
    """The steps on the H200, each without its model, and those of NeuSight's authors."""
    devices: dict[str, DeviceSpec] = {}
    h200 = []
    for step in h200_steps():
        if step.model not in devices:
            devices[step.model] = h200_without(step.model)
        h200.append(judge_step(step, devices[step.model]))
    return tuple(h200), tuple(map(judge_step, neusight_steps()))


def rank_correlation(cases: Sequence[Judged]) -> float:
    return correlate_ranks([(case.measured, case.predicted) for case in cases])


def summarize_steps(cases: Sequence[Judged], seconds: float) -> str:
    """When steps were predicted, and how far off they are together."""
    held = sum(case.is_held for case in cases) / len(cases)
    return (f"{describe_run(seconds)}: {len(cases)} steps.\n\n"
            f"**Median error {percent(statistics.median(case.error for case in cases))}, rank correlation "
            f"{rank_correlation(cases):.3f}, the range holds {percent(held)}.**")


def table_of_parts(judged: Sequence[tuple[Run, Judged]], parts: Mapping[str, Callable[[Run], bool]]) -> str:
    """The errors of those steps that belong to each part of a table of others."""
    rows = []
    for name, belongs in parts.items():
        cases = [case for run, case in judged if belongs(run)]
        if cases:
            rows.append([name, *describe_errors(cases)[:5],
                         percent(statistics.median(case.deviation for case in cases), signed=True)])
    return markdown(["rows", *ERRORS[:5], "median, with sign"], rows)


def other_predictors(results: Sequence[StepResult]) -> list[list[str]]:
    """What others predicted for the same steps, and what this project predicts for those that each of them has."""
    rows = []
    for who in dict.fromkeys(name for result in results for name in result.step.others):
        part = [result for result in results if who in result.step.others]
        errors = [abs(result.step.others[who] / result.step.seconds - 1) for result in part]
        ours = [result.wall.error for result in part]
        rows.append([who, str(len(part)), percent(statistics.median(errors)), percent(quantile(errors, 0.9)),
                     percent(statistics.median(ours)), percent(quantile(ours, 0.9))])
    return rows


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def step_tables() -> str:  # errors of whole steps, what other predictors say of the same, and every step
    h200, neusight = judge_steps()
    kernels = [result.kernels for result in h200 if result.kernels]
    rows = [["H200: sum of kernels", "8 %, 20 %", *describe_errors(kernels)[:3], "", "", describe_errors(kernels)[5]],
            ["H200: wall time", "10 %", *describe_errors([result.wall for result in h200])],
            ["A100, V100: wall time", "7 %, 18 %", *describe_errors([result.wall for result in neusight])],
            ["all: wall time", "", *describe_errors([result.wall for result in (*h200, *neusight)])]]
    every = [[result.step.id, milliseconds(result.step.seconds), milliseconds(result.wall.predicted),
              percent(result.wall.deviation, signed=True),
              f"{milliseconds(result.wall.low)} to {milliseconds(result.wall.high)}",
              milliseconds(result.kernels and result.kernels.measured),
              milliseconds(result.kernels and result.kernels.predicted), milliseconds(result.wall.roofline)]
             for result in (*h200, *neusight)]
    ranks = [f"{rank_correlation([result.wall for result in results]):.3f}" for results in (h200, neusight)]
    others = ["predictor", "steps", "median error", "nine in ten", "ours: median", "nine in ten"]
    columns = ["step", "measured", "predicted", "error", "range", "kernels measured", "predicted", "roofline"]
    return f"""{markdown(["steps", "bars", *ERRORS], rows, 2)}

Rank correlation (Spearman) between measured and predicted steps: {ranks[0]} on the H200, {ranks[1]} on A100 and V100.
What others predicted of the steps on A100 and V100 (as NeuSight's authors published it), and this project on the same:

{markdown(others, other_predictors(neusight))}

Every step, in ms:

{markdown(columns, every, cases="accuracy/steps")}"""


PARTS: Mapping[str, Callable[[], str]] = {"kernels": kernel_tables, "steps": step_tables}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="make these parts alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in options.parts or PARTS:
        began = time.perf_counter()
        tables = PARTS[name]()
        text = f"{describe_run(time.perf_counter() - began)}.\n\n{tables}"
        publish("accuracy.md", {f"accuracy.latency {name}": text}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
