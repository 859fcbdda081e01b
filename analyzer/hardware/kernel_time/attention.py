"""Time of attention kernels."""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from analyzer.errors import InputError
from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime, find_constants, slowdown_of_board


@dataclass(frozen=True, slots=True)
class Design:
    """One generation of attention kernels.

    - ``generation``: the instructions of its matrix products, which make its constants.
    - ``head_dims``: sizes of a head that are compiled; others are padded to the next one. ``tiles``: for each of them,
      rows of queries that a thread block takes, and keys it takes at a time.
    - ``packs``: whether the query heads that share keys are rows of one tile (grouped queries), so that short sequences
      fill it. ``short_rows``: smaller tiles for fewer rows. ``decode_group``: the most heads that it packs when
      decoding.
    """

    generation: str
    head_dims: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    packs: bool = False
    short_rows: tuple[int, ...] = ()
    decode_group: int | None = None

    def choose(self, head_dim: int, rows: int) -> tuple[int, int, int]:
        """The padded head, the queries of a tile and the keys of a block, for ``rows`` queries of a sequence."""
        place = next((i for i, padded in enumerate(self.head_dims) if head_dim <= padded), None)
        padded = math.ceil(head_dim / 8) * 8 if place is None else self.head_dims[place]
        tile, columns = self.tiles[-1 if place is None else place]
        for short in self.short_rows:
            if rows <= short < tile:
                return padded, short, columns
        return padded, tile, columns


#: Instructions of the tensor cores' products: of one warp (Volta to Ada, and GeForce and RTX PRO Blackwell), of four
#: with operands in shared memory (Hopper), with accumulators in tensor memory (data-centre Blackwell).
MMA, WGMMA, TCGEN05 = "mma", "wgmma", "tcgen05"

# FlashAttention 2, csrc/flash_attn/src/flash_fwd_launch_template.h.
FLASH_2 = Design(MMA, (32, 64, 96, 128, 192, 256), ((128, 128), (128, 128), (128, 64), (128, 64), (128, 64), (64, 64)),
                 decode_group=10**6)
# FlashInfer, include/flashinfer/utils.cuh (FA2DetermineCtaTileQ): grouped queries packed, small tiles for few rows.
_FLASH_INFER = Design(MMA, FLASH_2.head_dims, FLASH_2.tiles, packs=True, short_rows=(16, 64))
# FlashAttention 3, hopper/tile_size.h (causal); packs where sequences are of various lengths.
_FLASH_3 = Design(
    WGMMA, (64, 96, 128, 192, 256), ((192, 128), (192, 128), (128, 128), (128, 96), (128, 80)), packs=True)
# TensorRT-LLM before Blackwell, cpp/kernels/fmha_v2: no packing of grouped queries in the context phase; its XQA kernel
# packs up to 16 when decoding, the masked multi-head attention kernel none.
_FMHA_TILES = (32, 64, 80, 96, 128, 192, 256), ((64, 128),) * 4 + ((64, 128), (64, 64), (64, 64))
_FMHA_V2, _FMHA_V2_HOPPER = (Design(generation, *_FMHA_TILES, decode_group=16) for generation in (MMA, WGMMA))
# Blackwell (FlashAttention 4, TensorRT-LLM's trtllm-gen): two tiles of 128 queries in tensor memory.
_TWO_TILES = Design(TCGEN05, (64, 96, 128, 192, 256), ((256, 128),) * 5)
# cuDNN on Hopper, from the names of its kernels (..._sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_...): two groups
# of 64 queries, blocks of 128 keys.
_CUDNN = Design(WGMMA, (64, 96, 128, 192, 256), ((128, 128),) * 5)
# PyTorch, mem_eff_attention/kernels/cutlassF.h: heads up to 64 in registers, larger ones through shared memory.
_EFFICIENT = Design(MMA, (32, 64, 128, 256), ((64, 64), (64, 64), (32, 128), (32, 128)))


def find_generation(device: DeviceSpec) -> str:
    """The instructions of a device's tensor cores; other vendors' are of one wavefront, as the first are of a warp."""
    if device.vendor not in ("NVIDIA", None):
        return MMA
    return {9: WGMMA, 10: TCGEN05}.get((device.compute_capability or (8, 0))[0], MMA)


#: Part of the tensor cores' peak that instructions of one warp reach where there are newer ones: 62 % on an H100 (Luo
#: et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking, 2024, on tensor cores);
#: on a B200, whose multiprocessors have twice the peak, assumed to be as many FLOPs a clock.
ONE_WARP_SHARE = {MMA: 1.0, WGMMA: 0.62, TCGEN05: 0.31}


def find_design(kernel: str, device: DeviceSpec) -> Design:
    """The kernels that a library runs on a device."""
    if kernel == "efficient":
        return _EFFICIENT
    generation = find_generation(device)
    if kernel == "flash" or generation == MMA:
        return {"sglang": _FLASH_INFER, "trtllm": _FMHA_V2}.get(kernel, FLASH_2)
    if generation == WGMMA:
        return {"trtllm": _FMHA_V2_HOPPER, "cudnn": _CUDNN}.get(kernel, _FLASH_3)
    return _TWO_TILES


def count_blocks(q_len: int, kv_len: int, rows: float, block: int, causal: bool, window: int) -> tuple[float, float]:
    """Blocks of keys that a tile of ``rows`` queries reads: in the mean over tiles, and of the longest one. Tiles on
    the diagonal count whole, which is what kernels execute. A causal query sees the keys up to its own place counted
    from the end (``kv_len - q_len`` are older); a window of w limits it to the last w + 1 of them.
    """
    tiles = math.ceil(q_len / rows)
    last = math.ceil(kv_len / block)
    if not causal and not window:
        return float(last), float(last)
    step, first = min(rows, q_len), kv_len - q_len
    # a tile's columns end at first + (i + 1) * step; whole blocks: half of what does not divide is added in the mean
    excess = (block - math.gcd(int(step) or 1, block)) / 2
    limit = min(kv_len + 0.0, window + step) if window else float(kv_len)
    if causal:
        growing = min(tiles, max(0, math.ceil((limit - first) / step) - 1))  # tiles that end before the limit
        columns = (growing * (first + step * (growing + 1) / 2) + (tiles - growing) * limit) / tiles
    else:
        columns = limit = min(kv_len + 0.0, 2 * window + step)
    longest = max(1.0, min(float(last), (limit + excess) / block))
    return max(1.0, min(float(last), (columns + excess) / block)), longest


#: Exponentials that a multiprocessor takes in a clock: CUDA C++ Programming Guide, table "Throughput of Native
#: Arithmetic Instructions", special functions, the same from compute capability 5.0 to 10.0.
EXPONENTIALS_PER_CLOCK = 16
#: Clock of a device whose data sheet does not say: typical boost of data-centre devices.
TYPICAL_CLOCK_HERTZ = 1.7e9

#: Share of the last cache that one kernel's operands find; bytes that a multiprocessor takes from it in a clock. From
#: attention on an L40S, whose cache is six times as fast as its memory; others hardly differ from their memory.
CACHE_SHARE, CACHE_BYTES_PER_CLOCK = 0.66, 16
#: Elements of keys that a split of flash decoding takes at a time: 128 keys of 128 (flash_api.cpp, set_params_splitkv).
DECODE_BLOCK_ELEMENTS = 128 * 128

Constants = Mapping[str, float]


class AttentionSize(NamedTuple):
    """Sizes of one attention: ``kv_len`` counts all keys, ``window`` is 0 where there is none."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    item_bytes: int
    causal: bool
    window: int = 0
    dropout: bool = False
    masked: bool = False
    kv_item_bytes: int = 0  #: of a cache of another type than the queries, else 0
    stores_keys: bool = True  #: whether a serving library's kernels also write the new keys to the cache


def tile_seconds(size: AttentionSize, design: Design, device: DeviceSpec, matrix_rate: float, c: Constants) -> float:
    """Seconds in which the multiprocessors work off all tiles. A tile costs a fixed time (its first loads, its store)
    and, for each block of keys, two products and an exponential for each element, one after the other: kernels overlap
    them in part, which the constants ``mma`` and ``exp`` tell. Tiles of equal length run in whole waves; under a causal
    mask the longest ones start first, and what is left at the end is a share of the longest (``tail``).
    """
    multiprocessors, clock = device.multiprocessors or 1, device.clock_hertz or TYPICAL_CLOCK_HERTZ
    group = size.heads // size.kv_heads if design.packs else 1
    padded, rows, columns = design.choose(max(size.head_dim, size.value_dim), size.q_len * group)
    tiles = size.batch * (size.heads // group) * math.ceil(size.q_len * group / rows)
    mean, longest = count_blocks(size.q_len, size.kv_len, rows / group, columns, size.causal, size.window)
    clocks = c["exp"] / EXPONENTIALS_PER_CLOCK
    if size.dropout:
        clocks += c.get("dropout", 0.0)
    if size.masked:
        clocks += c.get("mask", 0.0)
    matrix_rate *= c["mma"] * (c.get("wide", 1.0) if padded > 128 else 1.0)
    block = rows * columns * (4 * padded * multiprocessors / matrix_rate + clocks / clock)
    fixed, waves = c["tile"] / clock, tiles / multiprocessors
    if mean == longest:
        return math.ceil(waves) * (fixed + mean * block)
    last = fixed + longest * block
    return max(last, min(waves * (fixed + mean * block) + c["tail"] * last, math.ceil(waves) * last))


def decode_seconds(size: AttentionSize, design: Design, device: DeviceSpec, c: Constants) -> float:
    """Seconds in which the multiprocessors work off one query for each sequence (flash decoding). The query heads that
    share keys are one tile of up to 64 rows; where there are fewer tiles than multiprocessors their keys are split
    among several, and a second kernel combines the parts. ``design.decode_group`` and a window say where each head is a
    tile of its own instead; FlashAttention 2 then splits nothing either (``seqlenq_ngroups_swapped`` in flash_api.cpp).
    """
    multiprocessors, clock = device.multiprocessors or 1, device.clock_hertz or TYPICAL_CLOCK_HERTZ
    keys = min(size.kv_len, size.window or size.kv_len)
    group = size.heads // size.kv_heads
    largest = design.decode_group
    is_alone = largest is not None and (size.window > 0 or group > largest or group == 1)
    tiles = size.batch * (size.heads if is_alone else size.kv_heads * math.ceil(group / 64))
    can_split = not (is_alone and design is FLASH_2)
    width = (size.head_dim + size.value_dim) / 2
    blocks = math.ceil(keys * width / DECODE_BLOCK_ELEMENTS)
    splits = min(blocks, multiprocessors // tiles) if can_split and tiles < multiprocessors else 1
    tile = c["tile"] * (0.5 + width / 256)  # half of it for the query and the output
    clocks = max(tiles / multiprocessors * (tile + c["block"] * blocks), tile + c["alone"] * math.ceil(blocks / splits))
    if splits > 1:
        clocks += c["combine"]
    if design is FLASH_2 and not is_alone and size.kv_heads > 1:
        clocks += c["swap"]
    return clocks / clock


def count_bytes(size: AttentionSize) -> int:
    """Bytes of queries, of the keys and values within reach, and of the output."""
    keys = min(size.kv_len, size.window + size.q_len) if size.window else size.kv_len
    width = size.batch * (size.head_dim + size.value_dim)
    return width * (size.q_len * size.heads * size.item_bytes
                    + keys * size.kv_heads * (size.kv_item_bytes or size.item_bytes))


def memory_seconds(nbytes: float, device: DeviceSpec, c: Constants) -> float:
    """Seconds to move bytes, of which those that fit a share of the last cache come at its rate; of twice that share
    none is found there again, as the oldest bytes leave first.
    """
    bandwidth = (device.memory_bandwidth or 1.0) * c["memory"]
    seconds = nbytes / bandwidth
    cache = (device.l2_bytes or 0) * CACHE_SHARE
    if nbytes < 2 * cache:
        rate = CACHE_BYTES_PER_CLOCK * (device.multiprocessors or 1) * (device.clock_hertz or TYPICAL_CLOCK_HERTZ)
        if rate > bandwidth:
            share = min(1.0, 2 - nbytes / cache)
            seconds *= 1 - share + share * bandwidth / rate
    return seconds


#: Kernels of PyTorch's scaled_dot_product_attention.
FUSED_KERNELS = ("flash", "cudnn", "efficient")
#: Kernels of serving libraries, which write the new keys and values to a paged cache as well.
SERVING_KERNELS = ("sglang", "vllm", "trtllm")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "float32": 4, "fp32": 4, "float8_e4m3fn": 1, "fp8": 1}
#: Products of a backward pass (scores again, gradients of values, weights, queries and keys) over those of a forward.
BACKWARD_PRODUCTS = 5 / 2
#: What a kernel takes that does nothing: 2.5 microseconds in a graph on an H100, A100 and H200.
KERNEL_CLOCKS = 5000.0


@functools.lru_cache(maxsize=256)
def find_group(kernel: str, phase: str, device: DeviceSpec) -> Constants | None:
    """The constants of one kernel in one phase: of its generation of tensor cores, else of any; None without any."""
    found = find_constants("attention", device)
    for generation in (find_design(kernel, device).generation, "any"):
        prefix = f"{kernel}.{generation}.{phase}."
        group = {name[len(prefix):]: value for name, value in found.items() if name.startswith(prefix)}
        if group:
            return group
    return None


def predict(size: AttentionSize, kernel: str, phase: str, device: DeviceSpec, c: Constants) -> KernelTime | None:
    """The time of one attention with given constants; None where the device lacks a figure that it takes. A floor of
    its kernels' latencies, in clocks; then arithmetic and memory, which overlap in part: their p-norm, where p of 1 is
    one after the other. Serving libraries also write the new keys and values to the cache, at ``write`` times what the
    bytes take at the memory's rate; TensorRT-LLM rotates the queries in the same kernel.
    """
    rates = device.flops_per_second
    # 16-bit products run at their peak. PyTorch's float32 kernels emulate float32 by three TF32 products from compute
    # capability 8.0 on (``OpMultiplyAddFastF32`` in its gemm_kernel_utils.h), and run on the CUDA cores before.
    rate = {1: rates.fp8 or rates.fp16, 2: rates.bf16 or rates.fp16 or rates.fp32}.get(
        size.item_bytes, rates.tf32 / 3 if rates.tf32 else rates.fp32)
    if rate is None or device.memory_bandwidth is None or device.multiprocessors is None:
        return None
    memory = memory_seconds(count_bytes(size), device, c)
    kernels, design = 1, find_design(kernel, device)
    if phase == "decode":
        arithmetic = decode_seconds(size, design, device, c)
        kernels = 2
    else:
        if phase == "backward":
            rate /= BACKWARD_PRODUCTS
            memory *= 2  # reads four of them and the gradient, writes three gradients
            kernels = 3
        if design.generation == MMA:
            rate *= ONE_WARP_SHARE[find_generation(device)]
        arithmetic = tile_seconds(size, design, device, rate, c)
    power = c["p"]
    seconds = (arithmetic ** power + memory ** power) ** (1 / power)
    floor = c["floor"]
    if not size.stores_keys:
        floor -= KERNEL_CLOCKS
    elif kernel in SERVING_KERNELS and size.causal:
        new_heads = 2 * size.kv_heads + (size.heads if kernel == "trtllm" else 0)
        new_bytes = 2 * size.batch * size.q_len * new_heads * size.head_dim * size.item_bytes
        seconds += c["write"] * new_bytes / device.memory_bandwidth
        kernels += 1
    floor /= (device.clock_hertz or TYPICAL_CLOCK_HERTZ)
    bound = "latency" if floor > seconds else "memory" if memory > arithmetic else "arithmetic"
    more = (slowdown_of_board(device) - 1) * seconds if bound == "arithmetic" else 0.0
    return KernelTime(floor + seconds, c.get("spread", 0.5), bound, kernels, load_seconds=more)


def attention_time(kernel: str, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int,
                   value_dim: int, dtype: str, device: DeviceSpec, *, causal: bool, window: int = 0,
                   backward: bool = False, dropout: bool = False, masked: bool = False, kv_item_bytes: int = 0,
                   stores_keys: bool = True) -> KernelTime | None:
    """Kernel time of fused attention of ``batch`` sequences, None where the device or the dtype has no model.

    - ``kernel``: one of PyTorch's or of a serving library's (``"paged"`` for any), which writes the new keys and values
      to its cache too, unless ``stores_keys`` is False. ``kv_item_bytes``: of a cache of another type than ``dtype``.
    - ``kv_len``: all keys, the new ones included; the queries are the last of them if ``causal``.
    - ``window``: keys before a query that it sees, 0 for all. ``masked``: an additive mask is read.
    - ``backward``: the gradients of queries, keys and values instead of the output.

    Work is counted as executed: tiles on the diagonal whole, padded heads, whole waves of tiles over the
    multiprocessors. Raises InputError for an unknown kernel.
    """
    if kernel not in FUSED_KERNELS + SERVING_KERNELS + ("paged",):
        raise InputError(f"attention_time(kernel={kernel!r}): unknown kernel; those known are "
                         f"{', '.join(FUSED_KERNELS + SERVING_KERNELS)} and paged")
    item_bytes = _ITEM_BYTES.get(dtype.removeprefix("torch."))
    if item_bytes is None or device.kind != "cuda":
        return None
    if 0 in (batch, heads, q_len, kv_len):
        return NO_TIME
    kernel = "vllm" if kernel == "paged" else kernel
    size = AttentionSize(batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, item_bytes, causal, window,
                         dropout, masked, kv_item_bytes, stores_keys)
    phase = find_phase(kernel, size, device, backward)
    constants = find_group(kernel, phase, device)
    return None if constants is None else predict(size, kernel, phase, device, constants)


def find_phase(kernel: str, size: AttentionSize, device: DeviceSpec, backward: bool = False) -> str:
    """Which constants an attention takes: forward and backward of PyTorch's kernels, three phases of serving."""
    if backward:
        return "backward"
    if kernel in SERVING_KERNELS:
        if not size.causal:
            return "encoder"
        # of a sequence's first key TensorRT-LLM's kernels are those of a prompt, also in SGLang on Blackwell
        is_prompt = size.kv_len == 1 and (kernel == "trtllm" or
                                          kernel == "sglang" and find_generation(device) == TCGEN05)
        return "decode" if size.q_len == 1 and not is_prompt else "prefill"
    # FlashAttention splits the keys of a single query (flash_api.cpp); the others take a tile for it
    return "decode" if kernel == "flash" and size.q_len == 1 else "forward"
