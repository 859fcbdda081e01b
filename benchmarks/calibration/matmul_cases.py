"""Measured matrix products, as cases that a model of kernels can be asked for: sizes, what lay in a cache, the clock.

Sources and licences: ``benchmarks/truth/kernels/README.md``. What was measured beside the kernel is told apart here:

- gemm.csv: a CUDA graph of 5 (trtllm) or 6 layers in turn, whose weights stay in the L2 cache where they fit together.
  vllm's rows above 1e12 FLOPs multiplied weights that were never filled, at a clock that random numbers do not reach:
  left out. On L40S, trtllm's weights between 0.14 and 0.7 of the L2 cache: left out, as the number of layers shrinks
  there with their size and the cache may hold any part of them.
- fp32_ops.csv: one call on an idle device, so ``measured = launch + max(kernel, rest)`` with two figures for each
  machine and operator, the host's time before the kernel and after; estimated from the same rows.
- llm_layers.csv: kernel times by the profiler, rounded to microseconds.
- latency.json: only what rows cost that are not whole 16 bytes, which no other file has: `unaligned_cases`.
"""
from __future__ import annotations

import functools
import json
import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time.matmul import power_of_two
from benchmarks.truth.table import read_rows, read_truth

FOLDS = 3

_DEVICES = {"A100 (Vidur)": "a100_80gb", "H100 (Vidur)": "h100_sxm"}
_LAYERS_HELD = (0.75, 1.0)  # of the L2 cache: layers that are smaller together stay in it, larger ones do not


@dataclass(frozen=True, slots=True)
class Case:
    """One measured product. ``clock`` names the figures of the harness that measured it, "" for none; ``source`` the
    program that ran it.
    """

    family: str
    device: str
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    seconds: float
    cached_weights: float = 0.0
    clock: str = ""
    quantizes: bool = False
    row_bytes: int = 16
    source: str = ""

    @property
    def fold(self) -> int:  # the fold of its shape: all rows of one shape are in one
        return zlib.crc32(f"{self.batch} {self.m} {self.n} {self.k}".encode()) % FOLDS


@functools.cache
def device_of(name: str) -> DeviceSpec:  # the device of a row, by what it calls itself
    return find_device(_DEVICES.get(name, name))


def _cached_weights(framework: str, nbytes: int, device: DeviceSpec) -> float:
    """The share of a layer's weights that is still in the L2 cache when its turn comes again."""
    layers = 5 if framework.startswith("trtllm") else 6
    low, high = _LAYERS_HELD
    return min(max((high - layers * nbytes / (device.l2_bytes or 1)) / (high - low), 0.0), 1.0)


def _is_doubtful(framework: str, flops: int, weight_bytes: int, device: DeviceSpec) -> bool:
    if framework.startswith("vllm"):
        return flops > 1e12
    share = weight_bytes / (device.l2_bytes or 1)
    return device.name == "l40s" and framework.startswith("trtllm") and 0.14 < share < 0.7


def _gemm_cases() -> Iterator[Case]:
    for row in read_rows("gemm"):
        device, framework = device_of(row["device"]), row["framework"]
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        dtype = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}[row["dtype"]]
        nbytes = n * k * (2 if dtype == "bfloat16" else 1)
        if _is_doubtful(framework, 2 * m * n * k, nbytes, device):
            continue
        quantizes = dtype != "bfloat16"
        yield Case("matrix product", device.name, dtype, 1, m, n, k, float(row["us"]) * 1e-6,
                   _cached_weights(framework, nbytes, device),
                   f"{framework.split('-')[0]} quantized" if quantizes else "", quantizes, source=framework)


def _layer_cases() -> Iterator[Case]:
    for row in read_rows("llm_layers"):
        if row["n"]:
            yield Case("matrix product", device_of(row["device"]).name, "float16", 1, int(row["tokens"]),
                       int(row["n"]), int(row["k"]), float(row["us"]) * 1e-6, source="vidur")


def unaligned_cases(without: str = "") -> Iterator[Case]:
    """Products of steps on an H200 with rows that are not whole 16 bytes: those of two vocabularies; ``without`` a
    model.
    """
    for step in read_truth("latency")["cases"]:
        for op in step["ops"] if step["id"].partition("-")[0] != without else ():
            if "bf16" not in step["id"] or op["op"] not in ("aten::mm", "aten::addmm"):
                continue
            (m, k), (_, n) = json.loads(op["shapes"])[op["op"] == "aten::addmm":][:2]
            row_bytes = power_of_two(2 * math.gcd(m, n, k))
            if row_bytes < 16:
                yield Case("step", "h200", "bfloat16", 1, m, n, k, op["us"] / op["n"] * 1e-6, row_bytes=row_bytes)


def _float32_cases() -> Iterator[Case]:
    for row in read_rows("fp32_ops"):
        if row["op"] in ("bmm", "linear"):
            device = device_of(row["device"])
            batch, m, n, k = (int(row[name] or 1) for name in "bmnk")
            nbytes = 4 * batch * (m * n + k * (m + n))
            yield Case("fp32 operator", device.name, "float32", batch, m, n, k, float(row["us"]) * 1e-6,
                       float(nbytes < (device.l2_bytes or 0)), f"{device.name} {row['op']}",
                       row_bytes=power_of_two(4 * math.gcd(n, k)) if row["op"] == "linear" else 16, source="neusight")


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Every measured product but those that the module's text leaves out, in the order of the files."""
    return (*_gemm_cases(), *_layer_cases(), *_float32_cases())


def sample(cases: list[Case], count: int, seed: int = 0) -> list[Case]:  # a deterministic sample of at most ``count``
    return cases if len(cases) <= count else random.Random(seed).sample(cases, count)
