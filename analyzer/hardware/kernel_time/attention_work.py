"""Arithmetic and memory time of fused attention on a device, before what a library adds to it."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .attention_tile import FLASH_2, Design, count_blocks

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
    """Seconds in which the multiprocessors work off one query for each sequence (flash decoding).

    The query heads that share keys are one tile of up to 64 rows; where there are fewer tiles than multiprocessors
    their keys are split among several, and a second kernel combines the parts. ``design.decode_group`` and a window
    say where each head is a tile of its own instead; FlashAttention 2 then splits nothing either
    (``seqlenq_ngroups_swapped`` in flash_api.cpp).
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
    clocks = max(tiles / multiprocessors * (tile + c["block"] * blocks),
                 tile + c["alone"] * math.ceil(blocks / splits))
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
    """Seconds to move bytes of which those that fit the last cache come from it.

    A working set below a share of the cache is read at the cache's rate; one of twice that share is not found there
    again, as the oldest bytes leave first.
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
