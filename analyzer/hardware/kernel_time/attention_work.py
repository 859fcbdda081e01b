"""Arithmetic and memory time of fused attention on a device, before what a library adds to it."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .attention_tile import Design, count_blocks

#: Exponentials that a multiprocessor takes in a clock: CUDA C++ Programming Guide, table "Throughput of Native
#: Arithmetic Instructions", special functions, the same from compute capability 5.0 to 10.0.
EXPONENTIALS_PER_CLOCK = 16
#: Clock of a device whose data sheet does not say: typical boost of data-centre devices.
TYPICAL_CLOCK_HERTZ = 1.7e9

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


def find_matrix_rate(item_bytes: int, device: DeviceSpec) -> float | None:
    """FLOP/s of the tensor cores on attention's products, None if unknown.

    16-bit products run at their peak. PyTorch's float32 kernels emulate float32 by three TF32 products from compute
    capability 8.0 on (``OpMultiplyAddFastF32`` in its gemm_kernel_utils.h), and run on the CUDA cores before.
    """
    rates = device.flops_per_second
    if item_bytes == 1:
        return rates.fp8 or rates.fp16
    if item_bytes == 2:
        return rates.bf16 or rates.fp16 or rates.fp32
    return rates.tf32 / 3 if rates.tf32 else rates.fp32


def tile_seconds(size: AttentionSize, design: Design, device: DeviceSpec, matrix_rate: float, c: Constants) -> float:
    """Seconds in which the multiprocessors work off all tiles.

    A tile costs a fixed time (its first loads, its store) and, for each block of keys, two products and an exponential
    for each element, one after the other: kernels overlap them in part, which the constants ``mma`` and ``exp`` tell.
    Tiles of equal length run in whole waves; under a causal mask the longest ones start first, and what is left at
    the end is a share of the longest (``tail``).
    """
    multiprocessors, clock = device.multiprocessors or 1, device.clock_hertz or TYPICAL_CLOCK_HERTZ
    padded, rows, columns = design.choose(max(size.head_dim, size.value_dim))
    group = size.heads // size.kv_heads if design.packs else 1
    tiles = size.batch * (size.heads // group) * math.ceil(size.q_len * group / rows)
    mean, longest = count_blocks(size.q_len, size.kv_len, rows / group, columns, size.causal, size.window)
    clocks = c["exp"] / EXPONENTIALS_PER_CLOCK
    if size.dropout:
        clocks += c.get("dropout", 0.0)
    if size.masked:
        clocks += c.get("mask", 0.0)
    block = rows * columns * (4 * padded * multiprocessors / (matrix_rate * c["mma"]) + clocks / clock)
    fixed, waves = c["tile"], tiles / multiprocessors
    if mean == longest:
        return math.ceil(waves) * (fixed + mean * block)
    last = fixed + longest * block
    return max(last, min(waves * (fixed + mean * block) + c["tail"] * last, math.ceil(waves) * last))


def decode_seconds(size: AttentionSize, device: DeviceSpec, c: Constants) -> float:
    """Seconds in which the multiprocessors work off one query for each sequence (flash decoding).

    The query heads that share keys are one tile of up to 64 rows; where there are fewer tiles than multiprocessors
    their keys are split among several, and a second kernel combines the parts.
    """
    multiprocessors = device.multiprocessors or 1
    keys = min(size.kv_len, size.window or size.kv_len)
    tiles = size.batch * size.kv_heads * math.ceil(size.heads * size.q_len / size.kv_heads / 64)
    blocks = math.ceil(keys / 64)
    block = c["block"] * (size.head_dim + size.value_dim) / 256
    if tiles >= multiprocessors:
        return tiles / multiprocessors * (c["tile"] + block * blocks)
    splits = min(blocks, multiprocessors // tiles)
    return c["tile"] + block * math.ceil(blocks / splits) + (c["combine"] if splits > 1 else 0.0)


def count_bytes(size: AttentionSize) -> int:
    """Bytes of queries, of the keys and values within reach, and of the output."""
    keys = min(size.kv_len, size.window + size.q_len) if size.window else size.kv_len
    elements = size.batch * (size.q_len * size.heads + keys * size.kv_heads) * (size.head_dim + size.value_dim)
    return elements * size.item_bytes


def memory_seconds(nbytes: float, device: DeviceSpec, c: Constants) -> float:
    """Seconds to move bytes of which those that fit the last cache come from it.

    A working set below a share ``l2`` of the cache is read ``l2_rate`` times as fast; one as large as the cache and
    more is not found there again, as the oldest bytes leave first.
    """
    seconds = nbytes / ((device.memory_bandwidth or 1.0) * c["memory"])
    cache = (device.l2_bytes or 0) * c["l2"]
    if cache and nbytes < 2 * cache:
        share = min(1.0, 2 - nbytes / cache)
        seconds *= 1 - share + share / c["l2_rate"]
    return seconds
