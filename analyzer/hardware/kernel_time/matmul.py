"""Time of matrix products."""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec, find_peak

from .estimate import BOUNDS, NO_TIME, KernelTime, find_constants, slowdown_of_board

#: Joules of a FLOP if a board's whole power limit went into its peak rate, by architecture: on the CUDA cores in
#: float32, on the tensor cores in 16 bits; from data sheets. 16 and 12 nm: V100 PCIe (250 W, 14 TFLOP/s, 112 TFLOP/s),
#: P40 (250 W, 12 TFLOP/s), Quadro RTX 8000 (260 W, 16.3 TFLOP/s, 130 TFLOP/s). 8 and 7 nm: RTX 3090 (350 W,
#: 35.6 TFLOP/s), A40 (300 W, 150 TFLOP/s), A100 SXM (400 W, 312 TFLOP/s). 5 and 4 nm: RTX 4090 (450 W, 82.6 TFLOP/s),
#: L40S (350 W, 362 TFLOP/s), RTX PRO 6000 Blackwell (600 W, 125 TFLOP/s, 504 TFLOP/s), H100 SXM (700 W,
#: 989 TFLOP/s), B200 (1000 W, 2250 TFLOP/s).
BOARD_JOULES = {"Pascal": (21e-12, 21e-12), "Volta": (18e-12, 2.2e-12), "Turing": (16e-12, 2.0e-12),
                "Ampere": (9.8e-12, 1.3e-12), "Ampere GA10x": (9.8e-12, 2.0e-12), "Ada Lovelace": (5.4e-12, 0.97e-12),
                "RTX Blackwell": (4.8e-12, 1.2e-12), "Hopper": (5.4e-12, 0.71e-12), "Blackwell": (5.4e-12, 0.44e-12)}


def slowdown_under_load(device: DeviceSpec, on_cuda_cores: bool, itemsize: int, flops_per_second: float,
                        joules_scale: float) -> float:
    """How many times longer a product takes once the clock has come down to what the power limit leaves; 1 or more.
    ``flops_per_second`` is what the kernels reach at the boost clock, ``joules_scale`` the fitted share of
    `BOARD_JOULES` that a FLOP really takes, on tensor cores in proportion to ``itemsize``, in bytes. 1 where the
    architecture or the limit is unknown.
    """
    joules = BOARD_JOULES.get(device.architecture or "")
    if joules is None or device.power_watts is None:
        return 1.0
    each = joules[0] if on_cuda_cores else joules[1] * itemsize / 2
    return max(flops_per_second * each * joules_scale / device.power_watts, 1.0)


# How a matrix product is cut into blocks: the tile and the split of k that take least time on the multiprocessors.
# A library's kernel gives each block of threads one tile of the output, ``rows`` by ``cols``, and blocks are dealt out
# to the multiprocessors: a multiprocessor with one block more than the others finishes last (wave quantisation), a tile
# that sticks out over the edge is computed whole (tile quantisation). A product with fewer tiles than multiprocessors
# is split over k, which costs adding the parts up. See NVIDIA, "Matrix Multiplication Background User's Guide"
# (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication), sections on both quantisations.

Tile = tuple[int, int]

#: Tiles of tensor-core kernels of cuBLAS and CUTLASS, (rows, cols).
TENSOR_TILES: tuple[Tile, ...] = (
    (256, 256), (256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (128, 32), (32, 128),
    (128, 16), (16, 128), (64, 64), (64, 32), (32, 64), (64, 16), (16, 64), (32, 32), (32, 16), (16, 32), (16, 16))
#: Those since Hopper, whose instructions take any multiple of 8 rows: the rows here are the most that a tile has, and
#: tiles share the rows of the product evenly. Their kernels write a tile while the next one is computed.
HOPPER_TILES: tuple[Tile, ...] = (
    (256, 256), (256, 192), (192, 256), (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64),
    (128, 64), (64, 256), (64, 128), (64, 64), (32, 128), (32, 64), (16, 128), (16, 64))
#: Tiles of cuBLAS's kernels for the CUDA cores, ``sgemm_COLSxROWS`` in their names.
SIMT_TILES: tuple[Tile, ...] = (
    (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32))
#: By generation of compute capability, those for batched float32 products, of which cuBLAS has few.
BATCHED_SIMT_TILES: dict[int, tuple[Tile, ...]] = {
    6: ((64, 128),), 7: ((64, 64), (128, 32), (32, 128), (64, 128)), 8: ((128, 128),)}
LEAST_K = 128  #: assumed: what a split of k leaves to each block at least, some steps of a tile


class Pipe(NamedTuple):
    """What a multiprocessor does for one block of a product, in seconds and bytes.

    - ``k_seconds``: a block that is alone takes at least this for each element of k, its loads being under way.
    - ``wave_seconds``: a block's start and end, which its own work does not hide.
    - ``split_seconds``: adding up the parts of a product that is split over k, besides its bytes, which the whole
      device moves at ``add_bytes_per_second``. ``store_seconds``: of one element of the output.
    - ``element_seconds``: what loading an operand costs besides, an element, where rows are not whole 16 bytes.
    """

    flops_per_second: float
    load_bytes_per_second: float
    k_seconds: float
    wave_seconds: float
    split_seconds: float
    add_bytes_per_second: float
    store_seconds: float
    element_seconds: float = 0.0


class Blocks(NamedTuple):
    """How a product is cut up: its tile, into how many parts k is split at most, and the seconds of its blocks."""

    seconds: float
    rows: int
    cols: int
    split: int


def cut_into_blocks(batch: int, m: int, n: int, k: int, itemsize: float, multiprocessors: int, pipe: Pipe,
                    tiles_at_hand: tuple[Tile, ...] = TENSOR_TILES) -> Blocks:
    """The tile and the split of least time for ``batch`` products [m, k] x [k, n] of ``itemsize`` bytes an element."""
    flops_rate, load_rate, k_seconds, wave_seconds, split_seconds, add_rate, store, element_seconds = pipe
    best = Blocks(float("inf"), 0, 0, 0)
    is_flexible = tiles_at_hand is HOPPER_TILES
    least_rows = max(m, tiles_at_hand[-1][0])  # no tile is taken of which more than half is empty
    least_cols = max(n, tiles_at_hand[-1][1])
    for rows, cols in tiles_at_hand:
        if rows >= 2 * least_rows or cols >= 2 * least_cols:
            continue
        down = -(-m // rows)
        if is_flexible:
            rows = -(-m // (8 * down)) * 8
        tiles = batch * down * -(-n // cols)
        step = max(2 * rows * cols / flops_rate, (rows + cols) * itemsize / load_rate) + (rows + cols) * element_seconds
        turns = -(-tiles // multiprocessors)  # blocks on the busiest multiprocessor
        tile_seconds = wave_seconds + rows * cols * store
        ends = 1 if is_flexible else turns
        seconds = max(turns * max(k * step, rows * cols * store if is_flexible else 0.0), k * k_seconds)
        seconds += tile_seconds * ends
        if seconds < best[0]:
            best = Blocks(seconds, rows, cols, 1)
        most = min(multiprocessors // tiles, k // LEAST_K)
        if most < 2:
            # assumed from 0.9 on: those that would wait in the last turn take parts of k
            if tiles < 0.9 * turns * multiprocessors:
                seconds = (k * max(tiles / multiprocessors * step, k_seconds) + tile_seconds * ends + split_seconds
                           + multiprocessors * rows * cols * 8 / add_rate)
                if seconds < best[0]:
                    best = Blocks(seconds, rows, cols, 2)
            continue
        for split in (most, most // 2):
            if split > 1:
                seconds = (-(-k // split) * max(step, k_seconds) + tile_seconds + split_seconds
                           + batch * m * n * 4 * (split + 1) / add_rate)
                if seconds < best[0]:
                    best = Blocks(seconds, rows, cols, split)
    return best


# The time of a matrix product: blocks on multiprocessors, bytes from memory, the clock under load, a kernel's floor.
# Constants are fitted by ``benchmarks/calibration/matmul.py``, for each kind of arithmetic of its own (`KINDS`).

#: torch dtype to the kind of arithmetic whose constants it takes, and bytes of an element of the factors.
KINDS = {"bfloat16": ("half", 2), "float16": ("half", 2), "float8_e4m3fn": ("byte", 1), "float8_e5m2": ("byte", 1),
         "int8": ("byte", 1), "uint8": ("byte", 1), "tf32": ("half", 4), "float32": ("single", 4),
         "float64": ("single", 8)}


#: Of the tensor cores' peak rate since Hopper, what the instructions of older ones reach, which kernels for unaligned
#: rows are made of: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking"
#: (arXiv 2402.13499), 62.9 % on average. Assumed for Blackwell too, of which no such row was measured.
MMA_SHARE = 0.629


class ProductMachine:
    """A device's figures and constants for products in one format. Raises KeyError for a dtype not of `KINDS`."""

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
        is_hopper = (device.compute_capability or (0, 0))[0] in (9, 10)  # 12 has the instructions of Ampere
        single = self.pipe
        if kind != "single" and is_hopper:
            single = single._replace(flops_per_second=single.flops_per_second * MMA_SHARE)
        for nbytes in (8, 4, 2, 1):
            loads = of("element_clocks") / clock * self.itemsize / nbytes
            self.pipes[nbytes] = single._replace(element_seconds=loads)
        self.bandwidth = device.memory_bandwidth * of("bandwidth_share")
        self.floor_seconds = of("floor_seconds")
        self.slowdown = max(slowdown_of_board(device), slowdown_under_load(
            device, kind == "single", self.itemsize, peak * of("peak_share"), of("joules_scale")))
        self.slow_seconds = of("slow_seconds")
        self.spreads = {bound: of(f"{bound}_spread") for bound in BOUNDS[:3]}
        self.unaligned_spread = 0.0 if kind == "single" else constants["unaligned_spread"]
        self.cache_bytes = of("cache_share") * (device.l2_bytes or 0)
        self.power = of("power")
        self.tiles = self.batched_tiles = HOPPER_TILES if is_hopper else TENSOR_TILES
        if kind == "single":
            self.tiles = SIMT_TILES
            self.batched_tiles = BATCHED_SIMT_TILES.get((device.compute_capability or (8, 0))[0], SIMT_TILES)

    def time(self, batch: int, m: int, n: int, k: int, row_bytes: int = 16, cached_weights: float = 0.0) -> KernelTime:
        """The time of ``batch`` products [m, k] x [k, n]. ``row_bytes``: a power of two up to 16 of which all operands'
        rows are whole numbers. ``cached_weights``: the share of the second operand that lies in the L2 cache. The
        first, which a kernel before has just written, lies there if the product's operands fit together, and so does
        the output.
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
        work = self._beside(busy, memory)
        if 2 * full < blocks.seconds and 2 * memory < busy or work < self.floor_seconds:
            bound = "latency"
        else:
            bound = "memory" if memory > busy else "arithmetic"
        spread = self.spreads[bound] if row_bytes == 16 else max(self.spreads[bound], self.unaligned_spread)
        return KernelTime(self.floor_seconds + work, spread, bound, 1 + (blocks.split > 1),
                          load_seconds=self._beside(blocks.seconds * self.slowdown, memory) - work)

    def _beside(self, busy: float, memory: float) -> float:
        return float((busy ** self.power + memory ** self.power) ** (1 / self.power))

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
                row_elements: int | None = None, has_weights: float = True) -> KernelTime | None:
    """The time of ``batch`` products [m, k] x [k, n] of ``dtype`` (torch's name), or None for an unknown device figure.

    - ``allow_tf32``: float32 products run on tensor cores in TF32.
    - ``row_elements``: of which all operands' rows in memory are whole numbers; by default of ``k`` and ``n``, as in
      ``torch.nn.functional.linear``. Rows that are not whole 16 bytes are loaded bit by bit.
    - ``has_weights``: the second operand was not touched lately, as a parameter's, and comes from memory; a share of 1
      where it is held in fewer bits than it is multiplied in.
    """
    if not batch * m * n:
        return NO_TIME
    machine = _machine(device, dtype, allow_tf32)
    if machine is None:
        return None
    row_bytes = power_of_two((row_elements or math.gcd(k, n)) * machine.itemsize)
    return machine.time(batch, m, n, max(k, 1), row_bytes, 1.0 - has_weights)  # no k: the output is filled with zeros
