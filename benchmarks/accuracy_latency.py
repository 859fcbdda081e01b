"""How right predicted times are, cross-validated: `python -m benchmarks.accuracy_latency` writes the section of
docs/accuracy.md on time; with `kernels` or `steps` it prints that part alone. Steps under
`torch.compile` are in `benchmarks.accuracy_fused`.

No case is predicted with constants that it helped to fit: kernels by folds of shapes and with their device left out
(`benchmarks/calibration`), the steps on the H200 with their model left out of every fit, the host's included. The steps
of NeuSight's authors are in no fit.
"""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import tabulate
import torch

from analyzer import Profile
from analyzer.hardware import DeviceSpec, find_device, roofline_seconds
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.traffic import call_traffic
from analyzer.record.log import Log
from benchmarks.accuracy_memory import DOCUMENT, THROUGHPUT, TIME
from benchmarks.calibration import attention, collective, convolution, host, matmul, memory_bound
from benchmarks.measured_step import MeasuredStep, h200_steps, neusight_steps
from benchmarks.truth_table import read_truth

BARS = {("matrix product", "fold"): 0.09, ("attention", "fold"): 0.12, ("collective", "fold"): 0.12,
        ("fp32 operator", "fold"): 0.12}
LEFT_OUT_BAR = 0.18
FAMILIES = (matmul, attention, memory_bound, convolution, collective)
SCHEMES = {"fold": "shape left out", "device": "device left out"}


class Judged(NamedTuple):
    """A measured time and what was predicted of it without it."""

    family: str
    device: str
    scheme: str
    measured: float
    predicted: float
    low: float
    high: float
    roofline: float | None

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def is_held(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def width(self) -> float:
        """Half of the range, as a part of the prediction."""
        return (self.high - self.low) / 2 / self.predicted


@cache
def judge_kernels() -> tuple[Judged, ...]:
    """Kernels of all families, in both schemes."""
    found = []
    for module in FAMILIES:
        for family, device, scheme, measured, predicted, spread, roofline in module.cross_validate():
            found.append(Judged(family, device, scheme, measured, predicted, predicted / (1 + spread),
                                predicted * (1 + spread), roofline))
    return tuple(found)


def ninth(errors: Iterable[float]) -> float:
    """What nine in ten stay within."""
    ordered = sorted(errors)
    return ordered[math.ceil(0.9 * len(ordered)) - 1]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def print_table(rows: Sequence[Sequence[object]], headers: Sequence[str], text: int = 1) -> str:
    align = ["left"] * text + ["right"] * (len(headers) - text)
    return str(tabulate.tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align))


def describe_errors(cases: Sequence[Judged]) -> list[str]:
    """Of cases: how many, errors, the range, and the roofline's error."""
    rooflines = [abs(case.roofline / case.measured - 1) for case in cases if case.roofline is not None]
    return [f"{len(cases):,}", percent(statistics.median(case.error for case in cases)),
            percent(ninth(case.error for case in cases)),
            percent(sum(case.is_held for case in cases) / len(cases)),
            f"± {percent(statistics.median(case.width for case in cases))}",
            percent(statistics.median(rooflines) if rooflines else None)]


ERRORS = ("cases", "median error", "nine in ten", "range holds", "median width", "roofline's median")


def kernel_tables() -> str:
    """Errors by family and scheme, then by device."""
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
    return (f"{print_table(rows, ['family', 'predicted with its', 'bar', *ERRORS], 2)}\n\nBy device:\n\n"
            f"{print_table(devices, ['family', 'predicted with its', 'device', *ERRORS[:5]], 3)}")


# ---- whole steps


class StepResult(NamedTuple):
    """A measured step, what was predicted of it, and of its kernels' sum."""

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


def h200_without(model: str) -> DeviceSpec:
    """The H200 with constants that no step of a model helped to fit."""
    pace = dataclasses.asdict(host.hosts_without()[model]) | {"spread": host.find_spread()}
    return dataclasses.replace(find_device("h200"), calibration={
        "matmul": matmul.constants_without(model),
        "attention": attention.constants_without(model), "memory_bound": memory_bound.constants_without(model),
        "convolution": convolution.constants_without(model), "host": pace})


def judge_step(step: MeasuredStep, device: DeviceSpec | None = None) -> StepResult:
    """Predict a step on its device, or on a spec that stands for it."""
    rooflines: list[float | None] = []

    def keep_roofline(log: Log) -> Annotation:
        rooflines.append(roofline_of(log, find_device(step.device)))
        return Annotation()

    p: Profile = (step if device is None else dataclasses.replace(step, device=device)).profile(
        profilers={"roofline": keep_roofline})
    assert p.step_seconds is not None and p.kernel_seconds is not None and p.step_seconds_range is not None
    low, high = p.step_seconds_range
    wall = Judged("step", str(step.device), step.model, step.seconds, p.step_seconds, low, high, rooflines[-1])
    kernels = None if step.kernel_seconds is None else Judged(
        "kernels", str(step.device), step.model, step.kernel_seconds, p.kernel_seconds, p.kernel_seconds,
        p.kernel_seconds, rooflines[-1])
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
    """Spearman's coefficient between measured and predicted."""
    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    return statistics.correlation(ranks([case.measured for case in cases]), ranks([case.predicted for case in cases]))


def other_predictors(results: Sequence[StepResult]) -> list[list[str]]:
    """What others said of the same steps, and this project of those that each of them has."""
    rows = []
    for who in dict.fromkeys(name for result in results for name in result.step.others):
        part = [result for result in results if who in result.step.others]
        errors = [abs(result.step.others[who] / result.step.seconds - 1) for result in part]
        ours = [result.wall.error for result in part]
        rows.append([who, str(len(part)), percent(statistics.median(errors)), percent(ninth(errors)),
                     percent(statistics.median(ours)), percent(ninth(ours))])
    return rows


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def step_tables() -> str:
    """Errors of whole steps, what other predictors say of the same, and every step."""
    h200, neusight = judge_steps()
    kernels = [result.kernels for result in h200 if result.kernels]
    rows = [["H200: sum of kernels", "8 %, 20 %", *describe_errors(kernels)[:3], "", "", describe_errors(kernels)[5]],
            ["H200: wall time", "10 %", *describe_errors([result.wall for result in h200])],
            ["A100, V100: wall time", "7 %, 18 %", *describe_errors([result.wall for result in neusight])],
            ["all: wall time", "", *describe_errors([result.wall for result in (*h200, *neusight)])]]
    every = [[result.step.id, milliseconds(result.step.seconds), milliseconds(result.wall.predicted),
              f"{100 * (result.wall.predicted / result.wall.measured - 1):+.1f} %",
              f"{milliseconds(result.wall.low)} to {milliseconds(result.wall.high)}",
              milliseconds(result.kernels and result.kernels.measured),
              milliseconds(result.kernels and result.kernels.predicted), milliseconds(result.wall.roofline)]
             for result in (*h200, *neusight)]
    ranks = [f"{rank_correlation([result.wall for result in results]):.3f}" for results in (h200, neusight)]
    others = ["predictor", "steps", "median error", "nine in ten", "ours: median", "nine in ten"]
    columns = ["step", "measured", "predicted", "error", "range", "kernels measured", "predicted", "roofline"]
    return f"""{print_table(rows, ["steps", "bars", *ERRORS], 2)}

Rank correlation (Spearman) between measured and predicted steps: {ranks[0]} on the H200, {ranks[1]} on A100 and V100.
What others predicted of the steps on A100 and V100 (as NeuSight's authors published it), and this project on the same:

{print_table(other_predictors(neusight), others)}

Every step, in ms:

{print_table(every, columns)}"""


PARTS: Mapping[str, tuple[str, object]] = {
    "kernels": ("### Kernels", kernel_tables), "steps": ("### Whole steps", step_tables)}


def section(seconds: float, parts: Mapping[str, str]) -> str:
    truth = read_truth("latency")
    versions = f"on {datetime.date.today()} with PyTorch {torch.__version__}"
    return f"""{TIME}
Measured on one {truth["device"]["name"]} (PyTorch {truth["torch"]}) and by the sources that
`benchmarks/truth/kernels/README.md` names; predicted {versions} on a machine without a GPU,
in {seconds:.0f} seconds, by

    python -m benchmarks.accuracy_latency

No case is predicted with constants that it helped to fit. A kernel is predicted with its shape left out, and with its
device left out of every fit, from the data sheet; "fp32 operator" is timed from the host, whose part of the measured
time is fitted for each machine on other shapes. A step on the H200 is predicted with its model left out of every fit,
the host's pace included; the steps on A100 and V100 are in none. The range of a prediction is to hold nine in ten
measured times; the width is half of it. The bars are those that the project set itself: median, and nine in ten.

""" + "\n\n".join(f"{PARTS[name][0]}\n\n{text}" for name, text in parts.items()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="print these parts alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    began = time.perf_counter()
    texts = {}
    for name in options.parts or PARTS:
        make = PARTS[name][1]
        assert callable(make)
        texts[name] = str(make())
        print(f"{PARTS[name][0]}\n\n{texts[name]}\n", flush=True)
    if not options.parts:
        before, _, rest = DOCUMENT.read_text().partition(TIME)
        _, title, after = rest.partition(THROUGHPUT)
        DOCUMENT.write_text(before + section(time.perf_counter() - began, texts) + f"\n{title}{after}" * bool(title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
