"""Constants of the kernels that memory bounds, fitted: ``python -m benchmarks.calibration.memory_bound``.

Data: the pointwise operators, softmax and layer norms of ``benchmarks/truth/kernels/fp32_ops.csv.gz`` (from
github.com/sitar-lab/NeuSight, MIT), the additions of ``llm_layers.csv.gz`` (github.com/microsoft/vidur, MIT), and the
operators of ``benchmarks/truth/latency.json`` (measured for this project on one H200), with what they were called with
from profiles of those models.

Method. The part of its bandwidth that a device reaches is the median over its large pointwise operators; architectures,
and devices with HBM and with GDDR, have those of their devices in the mean. All other constants have the operators that
they tell apart: coordinate descent over their logarithms makes the mean of ``|log(predicted / measured)|`` of these
least, a group of operators after the other. Spreads are what nine in ten residuals of folds, of models left out and of
devices left out lie within.

The float32 operators were timed from the host: what lies between two events is the launch, then the kernel, unless the
host is slower. `Harness` holds that of each machine; it is no part of the product.
"""
from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from analyzer.hardware import find_device
from analyzer.hardware.listing import roofline_seconds
from benchmarks.page import known
from benchmarks.truth.table import rounded, spread_of, write_constants

from .memory_bound_data import Operator, Row, read_operators, read_rows, read_sums
from .memory_bound_fit import (
    FOLDS,
    architecture_fractions,
    constants_without_device,
    device_constants,
    fold_of,
    fraction_name,
    harness_of,
    memory_rate,
    names_of_devices,
    operator_seconds,
    row_time,
    rows_constants,
    steps_constants,
    with_constants,
)

JUDGED = 500
FILLED_SECONDS = 15e-6     # of the data sheet's bandwidth, from here on a float32 operator is judged
LEAST_SPREAD = 0.1         # of a device: the float32 operators are of few kinds


class Judgement(NamedTuple):  # a row as it was predicted without it
    row: Row
    scheme: str
    predicted: float
    kernel: float
    floor: float


@cache
def judge_rows() -> tuple[Judgement, ...]:
    """Float32 operators whose kernels count, by folds and by devices left out; the host's part is from other shapes on
    the same machine in both.
    """
    found = []
    for name in names_of_devices():
        rows = [row for row in read_rows() if row.device.name == name
                and row.nbytes / memory_rate(row.device) > FILLED_SECONDS]
        rows = random.Random(3).sample(rows, min(len(rows), JUDGED))
        for scheme in ("fold", "device"):
            for fold in range(FOLDS):
                constants = device_constants(name, fold) if scheme == "fold" else constants_without_device(name)
                device, harness = with_constants(find_device(name), constants), harness_of(name, fold)
                for row in rows:
                    if fold_of(row) == fold:
                        kernel = row_time(row, device).seconds
                        found.append(Judgement(row, scheme, harness.seconds(row, kernel), kernel,
                                               harness.floors.get(row.op, 3e-5)))
    return tuple(found)


@cache
def judge_operators() -> tuple[tuple[Operator, float, bool], ...]:
    """Operators of steps, their error with their model left out of the fit, and whether latency bounds them."""
    found = []
    for model in sorted({operator.model for operator in read_operators()}):
        device = with_constants(find_device("h200"), steps_constants(model))
        for operator in read_operators():
            if operator.model == model:
                seconds, waits = operator_seconds(operator, device)
                found.append((operator, math.log(seconds / operator.seconds), waits))
    return tuple(found)


def rows_width(scheme: str, chooses: Callable[[str], bool]) -> float:
    """The width of the float32 operators of some devices, in a scheme."""
    return spread_of(math.log(j.predicted / j.row.seconds) for j in judge_rows()
                    if j.scheme == scheme and chooses(j.row.device.name))


def cross_validate() -> list[tuple[str, str, str, float, float, float, float]]:
    """Rows of (family, device, scheme, measured seconds, predicted seconds, spread, roofline seconds)."""
    found = []
    for j in judge_rows():
        row = j.row
        roofline = known(roofline_seconds(row.rows * row.columns, row.nbytes, "float32", row.device, False))
        found.append(("fp32 operator", row.device.name, j.scheme, row.seconds, j.predicted,
                      rows_width(j.scheme, row.device.name.__ne__), roofline))
    return found


def constants_without(model: str) -> dict[str, float]:
    """The constants of an H200 fitted without a model of ``latency.json``: what a judgement of that model's steps may
    know, as ``DeviceSpec.calibration["memory_bound"]`` takes them.
    """
    errors = [(error, waits) for operator, error, waits in judge_operators() if operator.model != model]
    return rounded({**steps_constants(model), "spread": spread_of(error for error, waits in errors if not waits),
                    "latency_spread": spread_of(error for error, waits in errors if waits)})


def write_product() -> None:
    generic = dict(rows_constants())
    errors = judge_operators()
    width = spread_of(error for _, error, waits in errors if not waits)
    generic["spread"] = max(width, rows_width("device", bool))
    generic["latency_spread"] = max(spread_of(error for _, error, waits in errors if waits), generic["spread"])
    steps = {**steps_constants(), "spread": width}
    devices = {name: rounded(device_constants(name), [fraction_name(find_device(name))]) for name in names_of_devices()}
    for name in devices:
        width_here = rows_width("fold", name.__eq__)
        devices[name]["spread"] = float(f"{max(width_here, LEAST_SPREAD):.4g}")
    devices["h200"] = rounded(steps, ["hbm_fraction", "spread"])
    architectures = {name: rounded(constants) for name, constants in architecture_fractions().items()}
    for name in sorted({row.device.name for row in read_sums()}):
        architectures.setdefault(find_device(name).architecture or "", {})["floor_seconds"] = sums_floor(name)
    architectures["Hopper"] = rounded(steps, ["floor_seconds", "hbm_fraction", "row_instructions"])  # finer clocks
    write_constants("memory_bound", {
        "data": "benchmarks/truth/kernels/fp32_ops.csv.gz (github.com/sitar-lab/NeuSight), llm_layers.csv.gz "
                "(github.com/microsoft/vidur), benchmarks/truth/latency.json (measured on an H200)",
        "licence": "MIT; MIT; the project's own", "date": "2026-11",
        "note": "seconds, latencies, instructions of an element or parts of a rate, as their names say; spread by "
                "models and devices left out"}, rounded(generic, sorted(generic)), architectures, devices)


def sums_floor(name: str) -> float:
    """Seconds of a kernel that does next to nothing on a device of which there are additions: the mean of those below
    half a mebibyte, which are measured to a microsecond.
    """
    return float(f"{statistics.mean(r.seconds for r in read_sums() if r.device.name == name and r.nbytes < 2**19):.4g}")


if __name__ == "__main__":
    write_product()
