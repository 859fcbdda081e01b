"""Constants of the models of convolutions, `analyzer/hardware/kernel_time/convolution.py`, and their cross-validation.

    python -m benchmarks.calibration.convolution

writes ``fitted/convolution.json``. Data, see `benchmarks/truth/kernels/README.md`: rows ``conv`` of fp32_ops.csv.gz
(NeuSight, MIT licence: 3x3 convolutions on CUDA cores of four devices), the convolutions of latency.json (one H200,
tensor cores), and depthwise ones: published, and those of convolution.csv.gz (one H200). Method: the mean of
|log(measured / predicted)|, each error no more than `FAR`, is brought down one constant at a time, in steps that
shrink; a fixed sample of rows, no random numbers.

The harness of the first counts its host: an idle GPU waits for the call, and the call costs more for each convolution
that the process ran before (`fp32_conv_order.csv.gz` holds the row of each in its device's file: 0.05 to 0.15 us each).
So a device has two constants of its own, which are the harness's and not the model's: they are fitted on that device's
other folds, in both schemes, and left out of the product.
"""
from __future__ import annotations

import ast
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, PeakRates, find_device, roofline_seconds
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.convolution_tile import ConvolutionShape, make_shape
from analyzer.hardware.kernel_time.estimate import KernelTime
from benchmarks.page import known
from benchmarks.truth.table import Constants, read_rows, read_truth, write_constants

DEVICES = {"NVIDIA A100 80GB PCIe": "a100_80gb_pcie", "Tesla V100-PCIE-32GB": "v100_pcie_32gb", "Tesla T4": "t4",
           "Tesla P4": "p4"}
IMAGE_CHANNELS = 3
# NVIDIA Turing GPU Architecture whitepaper WP-09183-001, Table 1, GeForce RTX 2080 Ti, reference board.
RTX_2080_TI = DeviceSpec("rtx_2080_ti", architecture="Turing", compute_capability=(7, 5), memory_bandwidth=616e9,
                         flops_per_second=PeakRates(fp32=13.4e12), multiprocessors=68, l2_bytes=5632 * 1024,
                         clock_hertz=1.545e9)


class Call(NamedTuple):  # one way of a convolution
    shape: ConvolutionShape
    stride: tuple[int, ...]
    dtype: str
    allow_tf32: bool
    channels_last: bool = False
    transposed: bool = False

    @classmethod
    def of(cls, dtype: str, allow_tf32: bool, way: str, batch: int, ins: int, outs: int, in_size: tuple[int, ...],
           out_size: tuple[int, ...], kernel_size: tuple[int, ...], groups: int = 1) -> Call:
        stride = tuple(max(1, round(i / o)) for i, o in zip(in_size, out_size))
        item_bytes = 4 if dtype == "float32" else 2
        shape = make_shape(way, batch, ins, outs, in_size, out_size, kernel_size, groups, item_bytes, stride,
                           (1,) * len(stride))
        return cls(shape, stride, dtype, allow_tf32)

    def time(self, device: DeviceSpec) -> KernelTime:  # the model's time on a device that has all figures it takes
        time = convolution_time(*self.shape[:8], self.dtype, device, stride=self.stride,
                                dilation=(1,) * len(self.stride), allow_tf32=self.allow_tf32,
                                channels_last=self.channels_last, transposed=self.transposed)
        return known(time)

    def roofline(self, device: DeviceSpec) -> float:  # seconds of a data sheet's roofline
        shape, (images, results, weights) = self.shape, self.shape.sizes
        flops = 2 * results * (shape.in_channels // shape.groups) * shape.taps
        return roofline_seconds(flops, (images + results + weights) * shape.item_bytes, self.dtype, device,
                                uses_tensor_cores=True, allow_tf32=self.allow_tf32) or 0.0


class Row(NamedTuple):
    """One measured operator: the calls that it makes, and where it was measured.

    ``group``: the fold, or the model. ``order``: how many the process had measured before. ``repeats``: such calls in a
    step.
    """

    calls: tuple[Call, ...]
    device: str
    group: str
    order: int
    seconds: float
    repeats: int


def read_fp32_rows(folds: int) -> list[Row]:  # the 3x3 convolutions in float32, a fold by shape
    order = {tuple(list(r.values())[:5]): int(r["row"]) for r in read_rows("fp32_conv_order")}
    rows = []
    for r in read_rows("fp32_ops"):
        if r["op"] == "conv":
            key = tuple(r[name] for name in ("device", "b", "c_in", "c_out", "size"))
            batch, ins, outs, size = map(int, key[1:])
            call = Call.of("float32", False, "forward", batch, ins, outs, (size, size), (size, size), (3, 3))
            fold = str((batch * 7 + ins * 31 + outs * 17 + size * 13) % folds)
            rows.append(Row((call,), DEVICES[key[0]], fold, order[key], float(r["us"]) * 1e-6, 1))
    return rows


def read_step_rows() -> list[Row]:
    """The convolutions of the measured steps on an H200; a group is a model.

    A forward operator names no size of its result: it is that of the same layer's backward in another case.
    """
    found: list[tuple[str, str, bool, list[list[int]], float, int]] = []
    sizes: dict[tuple[str, str], tuple[int, ...]] = {}
    for case in read_truth("latency")["cases"]:
        model, dtype = case["id"].split("-")[0], "bfloat16" if "bf16" in case["id"] else "float32"
        for op in case["ops"]:
            is_backward = op["op"] == "aten::convolution_backward"
            if is_backward or op["op"] == "aten::cudnn_convolution":
                shapes = ast.literal_eval(op["shapes"])
                if is_backward:
                    sizes[model, str((shapes[1][1:], shapes[2]))] = tuple(shapes[0][2:])
                found.append((model, dtype, is_backward, shapes[is_backward:is_backward + 2], op["us"], op["n"]))
    rows = []
    for model, dtype, is_backward, (x, w), microseconds, count in found:
        ways = ["weight"] if is_backward else ["forward"]
        if is_backward and x[1] != IMAGE_CHANNELS:  # images take no gradient
            ways.append("input")
        result = sizes[model, str((x[1:], w))]
        calls = tuple(Call.of(dtype, True, way, x[0], x[1], w[0], tuple(x[2:]), result, tuple(w[2:])) for way in ways)
        rows.append(Row(calls, "h200", model, 0, microseconds * 1e-6 / count, count))
    return rows


class Depthwise(NamedTuple):  # one measured way of a depthwise convolution
    call: Call
    device: DeviceSpec
    seconds: float

    def predict(self, constants: Constants) -> float:
        return self.call.time(dataclasses.replace(self.device, calibration={
            "convolution": {**ALL, **constants}})).seconds


def read_measured_calls() -> list[tuple[Call, float]]:
    """The convolutions of convolution.csv.gz on an H200, as cuDNN's heuristic chose them, and their seconds."""
    rows = []
    for r in read_rows("convolution"):
        (batch, ins, *size), (first, second, *kernel), stride, padding = (
            tuple(map(int, r[name].split())) for name in ("images", "weights", "stride", "padding"))
        transposed, groups = bool(int(r["transposed"])), int(r["groups"])
        out = tuple((i - 1) * s - 2 * p + k if transposed else (i + 2 * p - k) // s + 1
                    for i, s, p, k in zip(size, stride, padding, kernel))
        call = Call.of(r["dtype"], True, r["way"], batch, ins, second if transposed else first, tuple(size), out,
                       tuple(kernel), groups)
        rows.append((call._replace(stride=stride, channels_last=bool(int(r["channels_last"])),
                                   transposed=transposed), float(r["us"]) * 1e-6))
    return rows


def read_depthwise_rows() -> list[Depthwise]:
    """The published depthwise convolutions on an RTX 2080 Ti, a layer each, and those measured on an H200."""
    truth = read_truth("kernels/depthwise")
    channels = truth["channels"]
    published = [Depthwise(Call.of("float32", False, "forward", truth["batch"], channels, channels,
                                   (size, size), (size, size), (kernel, kernel), channels), RTX_2080_TI,
                           milliseconds / 1000 / truth["layers"])
                 for size, row in zip(map(int, truth["milliseconds"]), truth["milliseconds"].values())
                 for kernel, milliseconds in zip(truth["kernels"], row)]
    return published + [Depthwise(call, find_device("h200"), seconds) for call, seconds in read_measured_calls()
                        if call.shape.groups > 1]


FAMILY = "fp32 operator"
FOLDS = 3
FITTED_ROWS = 240    # of a device, in one fit
JUDGED_ROWS = 500    # of a device, in one scheme
ROUNDS = 7
FAR = math.log(1.5)  # an error counts no more than this: another algorithm was run, which no constant brings back

# Where the search begins: from the data sheet (rates are shares of a peak) and from what such kernels usually reach.
# None does better than "most": the best measured convolution reaches 0.8 of its pipe, and copies 0.95 of the bandwidth.
_START: dict[str, Constants] = json.loads(Path(__file__).with_suffix(".json").read_text())
CUDA_CORE_START, HARNESS_START, TENSOR_START, DEPTHWISE_START, MOST = (
    _START[kind] for kind in ("CUDA cores", "harness", "tensor cores", "depthwise", "most"))
# Not fitted. A step of depth of an output tile loads (rows + columns) * 2 bytes of 16-bit operands at 128 bytes a clock
# and multiplies rows * columns pairs at 1,024 a clock (A100 whitepaper, Table 4, a multiprocessor): 16 (1/rows +
# 1/columns) as long. A pipeline of some stages of 16 or 32 steps is filled first; one block fills a multiprocessor.
ASSUMED = {"tensor_tile_cost": 16.0, "tensor_prologue": 64.0, "tensor_resident": 1.0}
PUBLISHED_DEPTHWISE = ("depthwise_index", "depthwise_forward_tap")

NOTE = ("tensor cores: one H200, from which Hopper has its tensor_spread and others half as much again; depthwise: "
        "published for an RTX 2080 Ti (arXiv 2203.06717, Table 1) and 7x7 on one H200 (convolution.csv.gz), "
        "depthwise_spread of other devices assumed")


def predict(row: Row, device: DeviceSpec, harness: Constants) -> float:
    """Predicted seconds of a row on a device with its calibration, the harness's host included."""
    host = harness.get("host_seconds", 0.0) + harness.get("host_seconds_per_row", 0.0) * row.order
    return host + sum(call.time(device).seconds for call in row.calls)


def with_constants(device: str, constants: Constants) -> DeviceSpec:
    """The device with these constants, whatever the file holds."""
    return dataclasses.replace(find_device(device), calibration={"convolution": constants})


def fit(start: Constants, evaluate: Callable[[Constants], float], restarts: int = 1) -> Constants:
    """Constants near the least of ``evaluate``, moved one after the other in steps of 40 % that are halved."""
    best, least, steps = dict(start), evaluate(start), dict.fromkeys(start, 1.4)
    for count in range(restarts * ROUNDS):
        if count % ROUNDS == 0:
            steps = dict.fromkeys(start, 1.4)
        for name in start:
            for factor in (steps[name], 1 / steps[name]):
                trial = {**best, name: min(MOST.get(name, math.inf), best[name] * factor)}
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


def sample(rows: Sequence[Row], count: int) -> list[Row]:  # ``count`` rows, evenly spread over the list
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else list(rows)


def fit_device(rows: Sequence[Row]) -> tuple[Constants, Constants]:
    """Constants of the CUDA cores of the rows' one device, and its harness's."""
    rows = sample(rows, FITTED_ROWS)
    both = fit({**BASE, **HARNESS_START}, lambda c: error_of(rows, with_constants(rows[0].device, {**ALL, **c}), c))
    return {name: both[name] for name in BASE}, {name: both[name] for name in HARNESS_START}


def fit_depthwise(left_out: Callable[[Call], bool] = lambda call: False) -> Constants:
    """Constants of depthwise kernels without the rows ``left_out``: those of PyTorch's forward one on the RTX 2080 Ti
    alone, the others on the H200.
    """
    rows = [row for row in read_depthwise_rows() if not left_out(row.call)]
    constants: Constants = {}
    for device, names in ((RTX_2080_TI.name, PUBLISHED_DEPTHWISE), ("h200", DEPTHWISE_START)):
        own = [row for row in rows if row.device.name == device]
        constants |= fit({name: DEPTHWISE_START[name] for name in names if name not in constants},
                         lambda c, own=own, known=dict(constants): statistics.fmean(  # type: ignore[misc]
                             abs(math.log(row.seconds / row.predict({**known, **c}))) for row in own))
    return constants


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
        for row, seconds in zip(rows, model)), restarts=2)


def fit_tensor(rows: Sequence[Row]) -> Constants:
    """Constants of the tensor cores; an operator counts by the fourth root of its share of a step."""
    shares: list[float] = [(row.seconds * row.repeats) ** 0.25 for row in rows]

    def error(constants: Constants) -> float:
        device = with_constants("h200", {**ALL, **constants})
        errors = (min(FAR, abs(math.log(row.seconds / predict(row, device, {})))) for row in rows)
        return math.fsum(share * error for share, error in zip(shares, errors)) / math.fsum(shares)

    return fit(TENSOR_START, error)


BASE = CUDA_CORE_START
# Of one device and leaving shapes out 0.4 at the worst; the forward kernel of the one device, on the other: 0.13.
DEPTHWISE_SPREAD = 0.5
ALL: Constants = {**CUDA_CORE_START, **TENSOR_START, **DEPTHWISE_START, **ASSUMED, "spread": 0.3, "tensor_spread": 0.3,
                  "depthwise_spread": DEPTHWISE_SPREAD}


def spread_of(errors: Iterable[float]) -> float:
    """The half-width, as a factor less 1, that holds nine in ten of |log(measured / predicted)|."""
    ordered = sorted(errors)
    return float(f"{math.expm1(ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]):.3g}")


class Judged(NamedTuple):  # one case, predicted without it
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


def constants_without(model: str) -> Constants:
    """The constants of tensor cores fitted without a model of ``latency.json``, as
    ``DeviceSpec.calibration["convolution"]`` takes them: what a judgement of that model's steps may know.
    """
    return fit_tensor([row for row in read_step_rows() if row.group != model])


def main() -> None:
    rows, steps = read_fp32_rows(FOLDS), read_step_rows()
    tensor, depthwise = fit_tensor(steps), fit_depthwise()
    tensor_spread = spread_of(abs(math.log(row.seconds / seconds)) for row, seconds in left_out_models(steps))
    judged = cross_validate()
    devices: dict[str, Constants] = {}
    architectures: dict[str, Constants] = {"Hopper": {"tensor_spread": tensor_spread}}
    harness: dict[str, Constants] = {}
    for name in DEVICES.values():
        constants, harness[name] = fit_device([row for row in rows if row.device == name])
        architectures[find_device(name).architecture or name] = constants
        devices[name] = {"spread": next(c.spread for c in judged if (c.device, c.scheme) == (name, "fold"))}
    spread = next(c.spread for c in judged if c.scheme == "device")
    write_constants("convolution",
                    {"data": "benchmarks/truth/kernels/fp32_ops.csv.gz (conv), benchmarks/truth/latency.json, "
                             "benchmarks/truth/kernels/convolution.csv.gz (depthwise)",
                     "licence": "NeuSight: MIT; latency.json: this project", "note": NOTE, "harness": harness},
                    {**fit_generic(rows, harness), **tensor, **depthwise, **ASSUMED, "spread": spread,
                     "tensor_spread": round(1.5 * tensor_spread, 3), "depthwise_spread": DEPTHWISE_SPREAD},
                    architectures, devices)

if __name__ == "__main__":
    main()
