"""Measured convolutions of `benchmarks/truth`, as calls of `convolution_time`."""
from __future__ import annotations

import ast
import math
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, PeakRates, roofline_seconds
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from benchmarks.truth_table import read_rows, read_truth

DEVICES = {"NVIDIA A100 80GB PCIe": "a100_80gb_pcie", "Tesla V100-PCIE-32GB": "v100_pcie_32gb", "Tesla T4": "t4",
           "Tesla P4": "p4"}
IMAGE_CHANNELS = 3
# Milliseconds of 24 depthwise layers on images [64, 384, size, size], by size and kernel: Ding et al., Scaling Up Your
# Kernels to 31x31, CVPR 2022 (arXiv 2203.06717), Table 1, rows "Pytorch" (1.9, float32, whose kernels are today's).
DEPTHWISE_LAYERS, DEPTHWISE_BATCH, DEPTHWISE_CHANNELS = 24, 64, 384
DEPTHWISE_KERNELS = (3, 5, 7, 9, 13, 17, 21, 27, 29, 31)
DEPTHWISE_MILLISECONDS = {
    16: (5.6, 11.0, 14.4, 17.6, 36.0, 57.2, 83.4, 133.5, 150.7, 171.4),
    32: (21.9, 34.1, 54.8, 76.1, 141.2, 230.5, 342.3, 557.8, 638.6, 734.8),
    64: (69.6, 141.2, 228.6, 319.8, 600.0, 977.7, 1454.4, 2371.1, 2698.4, 3090.4)}
# NVIDIA Turing GPU Architecture whitepaper WP-09183-001, Table 1, GeForce RTX 2080 Ti, reference board.
RTX_2080_TI = DeviceSpec("rtx_2080_ti", architecture="Turing", compute_capability=(7, 5), memory_bandwidth=616e9,
                         flops_per_second=PeakRates(fp32=13.4e12), multiprocessors=68, l2_bytes=5632 * 1024,
                         clock_hertz=1.545e9)


class Call(NamedTuple):
    """One way of a convolution of images that lie channels first."""

    way: str
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    dtype: str
    allow_tf32: bool
    groups: int = 1

    def time(self, device: DeviceSpec) -> KernelTime:
        """The model's time on a device that has all figures it takes."""
        stride = tuple(max(1, round(i / o)) for i, o in zip(self.in_size, self.out_size))
        time = convolution_time(
            self.way, self.batch, self.in_channels, self.out_channels, self.in_size, self.out_size, self.kernel_size,
            self.groups, self.dtype, device, stride=stride, dilation=(1,) * len(stride), allow_tf32=self.allow_tf32,
            channels_last=False)
        assert time is not None
        return time

    def roofline(self, device: DeviceSpec) -> float:
        """Seconds of a data sheet's roofline."""
        ins, outs, taps = self.in_channels // self.groups, self.out_channels, math.prod(self.kernel_size)
        images, results = self.in_channels * math.prod(self.in_size), outs * math.prod(self.out_size)
        elements, flops = self.batch * (images + results) + ins * outs * taps, 2 * self.batch * results * ins * taps
        return roofline_seconds(flops, elements * (4 if self.dtype == "float32" else 2), self.dtype, device,
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


def read_fp32_rows(folds: int) -> list[Row]:
    """The 3x3 convolutions in float32, a fold by shape."""
    order = {tuple(list(r.values())[:5]): int(r["row"]) for r in read_rows("fp32_conv_order")}
    rows = []
    for r in read_rows("fp32_ops"):
        if r["op"] == "conv":
            key = tuple(r[name] for name in ("device", "b", "c_in", "c_out", "size"))
            batch, ins, outs, size = map(int, key[1:])
            call = Call("forward", batch, ins, outs, (size, size), (size, size), (3, 3), "float32", False)
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
        calls = tuple(Call(way, x[0], x[1], w[0], tuple(x[2:]), result, tuple(w[2:]), dtype, True) for way in ways)
        rows.append(Row(calls, "h200", model, 0, microseconds * 1e-6 / count, count))
    return rows


def read_depthwise_rows() -> list[tuple[Call, float]]:
    """The published depthwise convolutions on an RTX 2080 Ti, and the seconds of one layer."""
    return [(Call("forward", DEPTHWISE_BATCH, DEPTHWISE_CHANNELS, DEPTHWISE_CHANNELS, (size, size), (size, size),
                  (kernel, kernel), "float32", False, DEPTHWISE_CHANNELS), milliseconds / 1000 / DEPTHWISE_LAYERS)
            for size, row in DEPTHWISE_MILLISECONDS.items() for kernel, milliseconds in zip(DEPTHWISE_KERNELS, row)]
