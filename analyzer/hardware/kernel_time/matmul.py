"""The time of a matrix product: blocks on multiprocessors, bytes from memory, the clock under load, a kernel's floor.

Constants are fitted by ``benchmarks/calibration/matmul.py``, for each kind of arithmetic of its own (`KINDS`).
"""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.roofline import find_peak

from .constants import find_constants
from .estimate import BOUNDS, NO_TIME, KernelTime
from .matmul_power import slowdown_under_load
from .matmul_tiles import BATCHED_SIMT_TILES, HOPPER_TILES, SIMT_TILES, TENSOR_TILES, Pipe, cut_into_blocks

#: torch dtype to the kind of arithmetic whose constants it takes, and bytes of an element of the factors.
KINDS = {"bfloat16": ("half", 2), "float16": ("half", 2), "float8_e4m3fn": ("byte", 1), "float8_e5m2": ("byte", 1),
         "int8": ("byte", 1), "uint8": ("byte", 1), "tf32": ("half", 4), "float32": ("single", 4),
         "float64": ("single", 8)}


#: Of the tensor cores' peak rate since Hopper, what the instructions of older ones reach, which kernels for unaligned
#: rows are made of: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking"
#: (arXiv 2402.13499), 62.9 % on average. Assumed for Blackwell too, of which no such row was measured.
MMA_SHARE = 0.629


class ProductMachine:
    """What a product in one format needs to know of a device, in bytes and seconds: its figures and the constants.

    Raises KeyError for a dtype that is not of `KINDS`.
    """

    __slots__ = ("multiprocessors", "pipe", "pipes", "bandwidth", "floor_seconds", "slowdown", "slow_seconds",
                 "spreads", "unaligned_spread", "cache_bytes", "itemsize", "output_itemsize", "power", "tiles",
                 "batched_tiles")

    def __init__(self, device: DeviceSpec, dtype: str, constants: Mapping[str, float]) -> None:
        kind, self.itemsize = KINDS[dtype]
        peak = find_peak(dtype, device, True)
        assert peak is not None and device.multiprocessors is not None and device.memory_bandwidth is not None

        def of(name: str) -> float:
            return constants[f"{kind}.{name}"]

        self.multiprocessors = device.multiprocessors
        self.output_itemsize = max(self.itemsize, 2)
        clock = device.clock_hertz or constants["clock_hertz"]
        load = of("load_bytes_per_clock") * clock
        self.pipe = Pipe(peak * of("peak_share") / self.multiprocessors, load, of("k_seconds"), of("wave_seconds"),
                         of("split_seconds"), of("add_share") * load * self.multiprocessors,
                         self.output_itemsize / (of("store_bytes_per_clock") * clock))
        self.pipes = {16: self.pipe}  # by bytes that rows of the operands are whole numbers of
        single = self.pipe
        if kind != "single" and (device.compute_capability or (0, 0))[0] in (9, 10):
            single = single._replace(flops_per_second=single.flops_per_second * MMA_SHARE)
        for nbytes in (8, 4, 2, 1):
            loads = of("element_clocks") / clock * self.itemsize / nbytes
            self.pipes[nbytes] = single._replace(element_seconds=loads)
        self.bandwidth = device.memory_bandwidth * of("bandwidth_share")
        self.floor_seconds = of("floor_seconds")
        self.slowdown = slowdown_under_load(
            device, kind == "single", self.itemsize, peak * of("peak_share"), of("joules_scale"))
        self.slow_seconds = of("slow_seconds")
        self.spreads = {bound: of(f"{bound}_spread") for bound in BOUNDS[:3]}
        self.unaligned_spread = 0.0 if kind == "single" else constants["unaligned_spread"]
        self.cache_bytes = of("cache_share") * (device.l2_bytes or 0)
        self.power = of("power")
        is_hopper = (device.compute_capability or (0, 0))[0] in (9, 10)  # 12 has the instructions of Ampere
        self.tiles = self.batched_tiles = HOPPER_TILES if is_hopper else TENSOR_TILES
        if kind == "single":
            self.tiles = SIMT_TILES
            self.batched_tiles = BATCHED_SIMT_TILES.get((device.compute_capability or (8, 0))[0], SIMT_TILES)

    def time(self, batch: int, m: int, n: int, k: int, row_bytes: int = 16, cached_weights: float = 0.0) -> KernelTime:
        """The time of ``batch`` products [m, k] x [k, n].

        ``row_bytes``: a power of two up to 16 of which all operands' rows are whole numbers. ``cached_weights``: the
        share of the second operand that lies in the L2 cache. The first, which a kernel before has just written, lies
        there if the product's operands fit together, and so does the output.
        """
        tiles = self.tiles if batch == 1 else self.batched_tiles
        if row_bytes < 16 and tiles is HOPPER_TILES:
            tiles = TENSOR_TILES  # of the older kernels
        blocks = cut_into_blocks(batch, m, n, k, self.itemsize, self.multiprocessors, self.pipes[row_bytes], tiles)
        weight_bytes = batch * n * k * self.itemsize
        activation_bytes = batch * m * (k * self.itemsize + n * self.output_itemsize)
        nbytes = weight_bytes * (1 - cached_weights)
        if activation_bytes + weight_bytes > self.cache_bytes:
            nbytes += activation_bytes
        memory = nbytes / self.bandwidth
        full = 2 * batch * m * n * k / (self.pipe.flops_per_second * self.multiprocessors)
        busy = blocks.seconds * (1 + (self.slowdown - 1) * full / (full + self.slow_seconds))
        work = (busy ** self.power + memory ** self.power) ** (1 / self.power)
        if 2 * full < blocks.seconds and 2 * memory < busy or work < self.floor_seconds:
            bound = "latency"
        else:
            bound = "memory" if memory > busy else "arithmetic"
        spread = self.spreads[bound] if row_bytes == 16 else max(self.spreads[bound], self.unaligned_spread)
        return KernelTime(self.floor_seconds + work, spread, bound, 1 + (blocks.split > 1))

    def quantizing_seconds(self, count: int) -> float:
        """Of the kernel that brings ``count`` 16-bit numbers into 8 bits."""
        return self.floor_seconds + 3 * count / self.bandwidth


def power_of_two(nbytes: int) -> int:
    """The largest power of two, up to 16, that divides a number of bytes; 16 for 0."""
    return (nbytes & -nbytes if nbytes % 16 else 16) or 16


def format_of(dtype: str, device: DeviceSpec, allow_tf32: bool = False) -> str | None:
    """The key of `KINDS` in which a device multiplies ``dtype``, None where a figure that it takes is unknown."""
    if allow_tf32 and dtype == "float32" and find_peak("tf32", device, True) is not None:
        dtype = "tf32"
    peak = find_peak(dtype, device, True) if dtype in KINDS else None
    if peak is None or device.kind != "cuda" or device.memory_bandwidth is None or device.multiprocessors is None:
        return None
    return "float32" if dtype in ("bfloat16", "float16", "tf32") and peak == device.flops_per_second.fp32 else dtype


@functools.lru_cache(maxsize=64)
def _machine(device: DeviceSpec, dtype: str, allow_tf32: bool) -> ProductMachine | None:
    name = format_of(dtype, device, allow_tf32)
    return None if name is None else ProductMachine(device, name, find_constants("matmul", device))


def matmul_time(batch: int, m: int, n: int, k: int, dtype: str, device: DeviceSpec, *, allow_tf32: bool = False,
                has_bias: bool = False, quantizes_input: bool = False,
                row_elements: int | None = None, has_weights: bool = True) -> KernelTime | None:
    """The time of ``batch`` products [m, k] x [k, n] of ``dtype`` (torch's name), or None for an unknown device figure.

    - ``allow_tf32``: float32 products run on tensor cores in TF32.
    - ``has_bias``: a bias is added, which the same kernel does.
    - ``row_elements``: of which all operands' rows in memory are whole numbers; by default of ``k`` and ``n``, as in
      ``torch.nn.functional.linear``. Rows that are not whole 16 bytes are loaded bit by bit.
    - ``has_weights``: the second operand was not touched lately, as a parameter's, and comes from memory.
    - ``quantizes_input``: a 16-bit input is brought into the 8-bit ``dtype`` first, by a kernel of its own.

    >>> from analyzer.hardware import find_device
    >>> time = matmul_time(1, 4096, 4096, 4096, "bfloat16", find_device("h200"))
    >>> 150e-6 < time.seconds < 250e-6, time.bound
    (True, 'arithmetic')
    """
    if not batch * m * n:
        return NO_TIME
    machine = _machine(device, dtype, allow_tf32)
    if machine is None:
        return None
    row_bytes = power_of_two((row_elements or math.gcd(k, n)) * machine.itemsize)
    time = machine.time(batch, m, n, max(k, 1), row_bytes, 1.0 - has_weights)  # no k: the output is filled with zeros
    if not quantizes_input:
        return time
    return KernelTime(time.seconds + machine.quantizing_seconds(batch * m * k), time.spread, time.bound,
                      time.kernels + 1)
