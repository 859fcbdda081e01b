"""Constants of the models of convolutions, `analyzer/hardware/kernel_time/convolution.py`, and their cross-validation.

    python -m benchmarks.calibration.convolution

writes ``fitted/convolution.json``. Data, see `benchmarks/truth/kernels/README.md`: rows ``conv`` of fp32_ops.csv.gz
(NeuSight, MIT licence: 3x3 convolutions on CUDA cores of four devices) and the convolutions of latency.json (one H200,
tensor cores). Method: the mean of |log(measured / predicted)|, each error no more than `FAR`, is brought down one
constant at a time, in steps that shrink; a fixed sample of rows, no random numbers.

The harness of the first counts its host: an idle GPU waits for the call, and the call costs more for each convolution
that the process ran before (`fp32_conv_order.csv.gz` holds the row of each in its device's file: 0.05 to 0.15 us each).
So a device has two constants of its own, which are the harness's and not the model's: they are fitted on that device's
other folds, in both schemes, and left out of the product.
"""
from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time import convolution

from .convolution_data import DEVICES, Row, read_fp32_rows, read_step_rows

OUTPUT = Path(convolution.__file__).parent / "fitted" / "convolution.json"
FAMILY = "fp32 operator"
FOLDS = 3
FITTED_ROWS = 240    # of a device, in one fit
JUDGED_ROWS = 500    # of a device, in one scheme
FAR = math.log(1.5)  # an error counts no more than this: another algorithm was run, which no constant brings back

# Where the search begins: from the data sheet (rates are shares of a peak) and from what such kernels usually reach.
CUDA_CORE_START = {
    "cuda_core_efficiency": 0.75, "cuda_core_tile_cost": 20.0, "cuda_core_prologue": 5.0, "cuda_core_resident": 1.5,
    "winograd_efficiency": 0.7, "winograd_prologue": 15.0, "winograd_resident": 1.2, "memory_efficiency": 0.6,
    "transform_efficiency": 0.5}
HARNESS_START = {"host_seconds": 30e-6, "host_seconds_per_row": 8e-8}
TENSOR_START = {
    "tf32_efficiency": 0.6, "half_efficiency": 0.7, "tensor_tile_cost": 30.0, "tensor_prologue": 64.0,
    "tensor_resident": 1.0, "tensor_memory_efficiency": 0.75, "copy_efficiency": 0.7, "copy_elements": 1.6,
    "few_channels_efficiency": 0.4, "kernel_seconds": 3e-6}
# No data: a share of the instructions that a multiprocessor can end, and of the reads that miss the last cache.
ASSUMED = {"depthwise_efficiency": 0.4, "depthwise_reread": 0.2, "depthwise_spread": 1.0}

Constants = dict[str, float]


def predict(row: Row, device: DeviceSpec, harness: Constants) -> float:
    """Predicted seconds of a row on a device with its calibration, the harness's host included."""
    host = harness.get("host_seconds", 0.0) + harness.get("host_seconds_per_row", 0.0) * row.order
    return host + sum(call.time(device).seconds for call in row.calls)


def with_constants(device: str, constants: Constants) -> DeviceSpec:
    """The device with these constants, whatever the file holds."""
    return dataclasses.replace(find_device(device), calibration={"convolution": constants})


def fit(start: Constants, evaluate: Callable[[Constants], float], rounds: int = 7) -> Constants:
    """Constants near the least of ``evaluate``, moved one after the other in steps of 30 % that are halved."""
    best, least, steps = dict(start), evaluate(start), dict.fromkeys(start, 1.3)
    for _ in range(rounds):
        for name in start:
            for factor in (steps[name], 1 / steps[name]):
                trial = {**best, name: best[name] * factor}
                error = evaluate(trial)
                if error < least - 1e-5:
                    best, least = trial, error
                    break
            else:
                steps[name] = math.sqrt(steps[name])
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def error_of(rows: Iterable[Row], device: DeviceSpec, harness: Constants) -> float:
    """Mean of |log(measured / predicted)|, each no more than `FAR`."""
    return statistics.fmean(min(FAR, abs(math.log(row.seconds / predict(row, device, harness)))) for row in rows)


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """``count`` rows, evenly spread over the list."""
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else list(rows)


def fit_device(rows: Sequence[Row]) -> tuple[Constants, Constants]:
    """Constants of the CUDA cores of the rows' one device, and its harness's."""
    rows = sample(rows, FITTED_ROWS)
    both = fit({**BASE, **HARNESS_START}, lambda c: error_of(rows, with_constants(rows[0].device, {**ALL, **c}), c))
    return {name: both[name] for name in BASE}, {name: both[name] for name in HARNESS_START}


def fit_generic(rows: Sequence[Row], harness: dict[str, Constants]) -> Constants:
    """One set of constants for all devices of the rows."""
    parts = [(sample([row for row in rows if row.device == device], FITTED_ROWS // 2), device)
             for device in DEVICES.values() if any(row.device == device for row in rows)]
    return fit(BASE, lambda c: statistics.fmean(
        error_of(part, with_constants(device, {**ALL, **c}), harness[device]) for part, device in parts))


def fit_harness(rows: Sequence[Row], constants: Constants) -> Constants:
    """The harness's constants alone, under given ones of the model."""
    rows = sample(rows, FITTED_ROWS)
    device = with_constants(rows[0].device, {**ALL, **constants})
    model = [predict(row, device, {}) for row in rows]
    return fit(HARNESS_START, lambda h: statistics.fmean(
        min(FAR, abs(math.log(row.seconds / (seconds + h["host_seconds"] + h["host_seconds_per_row"] * row.order))))
        for row, seconds in zip(rows, model)), rounds=14)


def fit_tensor(rows: Sequence[Row]) -> Constants:
    """Constants of the tensor cores."""
    return fit(TENSOR_START, lambda c: error_of(rows, with_constants("h200", {**ALL, **c}), {}))


BASE = CUDA_CORE_START
ALL: Constants = {**CUDA_CORE_START, **TENSOR_START, **ASSUMED, "spread": 0.3, "tensor_spread": 0.3}


def spread_of(errors: Iterable[float]) -> float:
    """The half-width, as a factor less 1, that holds nine in ten of |log(measured / predicted)|."""
    ordered = sorted(errors)
    return float(f"{math.expm1(ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]):.3g}")


class Judged(NamedTuple):
    """One case, predicted without it."""

    family: str
    device: str
    scheme: str
    measured_seconds: float
    predicted_seconds: float
    spread: float
    roofline_seconds: float


def _judge(rows: Sequence[Row], scheme: str, constants: Constants, harness: Constants) -> list[Judged]:
    device = with_constants(rows[0].device, {**ALL, **constants})
    return [Judged(FAMILY, row.device, scheme, row.seconds, predict(row, device, harness), 0.0,
                   sum(call.roofline(device) for call in row.calls)) for row in rows]


def cross_validate() -> list[Judged]:
    """Cases predicted without themselves: ``"fold"`` by shape, ``"device"`` by leaving a device out."""
    rows = read_fp32_rows(FOLDS)
    judged: list[Judged] = []
    by_device = {device: [row for row in rows if row.device == device] for device in DEVICES.values()}
    fitted = {}
    for device, own in by_device.items():
        found = []
        for fold in map(str, range(FOLDS)):
            constants, harness = fit_device([row for row in own if row.group != fold])
            fitted[device, fold] = constants, harness
            found += _judge(sample([row for row in own if row.group == fold], JUDGED_ROWS // FOLDS), "fold", constants,
                            harness)
        judged += _with_spread(found)
    left = []
    for device, own in by_device.items():
        others = [row for row in rows if row.device != device and row.group != "0"]
        constants = fit_generic(others, {name: fitted[name, "0"][1] for name in by_device if name != device})
        harness = fit_harness([row for row in own if row.group != "0"], constants)
        left += _judge(sample([row for row in own if row.group == "0"], JUDGED_ROWS), "device", constants, harness)
    return [*judged, *_with_spread(left)]


def _with_spread(judged: list[Judged]) -> list[Judged]:
    spread = spread_of(abs(math.log(case.measured_seconds / case.predicted_seconds)) for case in judged)
    return [case._replace(spread=spread) for case in judged]


def left_out_models(steps: Sequence[Row]) -> list[tuple[Row, float]]:
    """The convolutions of the steps with their predicted seconds, from constants of the other models."""
    predicted = []
    for model in sorted({row.group for row in steps}):
        constants = fit_tensor([row for row in steps if row.group != model])
        device = with_constants("h200", {**ALL, **constants})
        predicted += [(row, predict(row, device, {})) for row in steps if row.group == model]
    return predicted


def main() -> None:
    """Fit, cross-validate and write."""
    rows, steps = read_fp32_rows(FOLDS), read_step_rows()
    tensor = fit_tensor(steps)
    tensor_errors = [abs(math.log(row.seconds / seconds)) for row, seconds in left_out_models(steps)]
    tensor_spread = spread_of(tensor_errors)
    judged = cross_validate()
    devices: dict[str, Constants] = {"h200": {"tensor_spread": tensor_spread}}
    harness: dict[str, Constants] = {}
    for name in DEVICES.values():
        devices[name], harness[name] = fit_device([row for row in rows if row.device == name])
        devices[name]["spread"] = next(c.spread for c in judged if (c.device, c.scheme) == (name, "fold"))
    spread = next(c.spread for c in judged if c.scheme == "device")
    OUTPUT.write_text(json.dumps({
        "provenance": {
            "command": "python -m benchmarks.calibration.convolution",
            "data": "benchmarks/truth/kernels/fp32_ops.csv.gz (conv), benchmarks/truth/latency.json",
            "licence": "NeuSight: MIT; latency.json: this project",
            "note": "tensor_spread of devices other than the H200: no data, the H200's twice; depthwise_*: assumed",
            "harness": harness},
        "generic": {**fit_generic(rows, harness), **tensor, **ASSUMED, "spread": spread,
                    "tensor_spread": 2 * tensor_spread},
        "architectures": {}, "devices": devices}, indent=1) + "\n")
    for scheme in ("fold", "device"):
        for name in DEVICES.values():
            errors = sorted(abs(c.predicted_seconds / c.measured_seconds - 1) for c in judged
                            if (c.device, c.scheme) == (name, scheme))
            print(f"{scheme:7} {name:16} {len(errors)} median {statistics.median(errors):.1%} "
                  f"nine in ten {errors[len(errors) * 9 // 10]:.1%}")
    print(f"tensor cores, a model left out: median {math.expm1(statistics.median(tensor_errors)):.1%}, nine in ten "
          f"{tensor_spread:.1%}")


if __name__ == "__main__":
    main()
