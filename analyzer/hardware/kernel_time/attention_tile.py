"""How attention kernels cut their work: tiles of queries, blocks of keys, and what of a mask they still execute."""
from __future__ import annotations

import math
from dataclasses import dataclass

from analyzer.hardware.device_spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Design:
    """One generation of attention kernels.

    - ``head_dims``: sizes of a head that are compiled; others are padded to the next one.
    - ``tiles``: for each of them, rows of queries that a thread block takes, and keys it takes at a time.
    - ``packs``: whether the query heads that share keys are rows of one tile (grouped queries), so that short
      sequences fill it.
    """

    head_dims: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    packs: bool = False

    def choose(self, head_dim: int) -> tuple[int, int, int]:
        """The padded head, the queries of a tile and the keys of a block."""
        for padded, tile in zip(self.head_dims, self.tiles):
            if head_dim <= padded:
                return padded, *tile
        return math.ceil(head_dim / 8) * 8, *self.tiles[-1]


# FlashAttention 2, csrc/flash_attn/src/flash_fwd_launch_template.h: mma.sync instructions, one tile a thread block.
_FLASH_2 = Design((32, 64, 96, 128, 192, 256), ((128, 128), (128, 128), (128, 64), (128, 64), (128, 64), (64, 64)))
# FlashInfer, include/flashinfer/attention/prefill.cuh: the same with grouped queries packed.
_FLASH_INFER = Design(_FLASH_2.head_dims, _FLASH_2.tiles, packs=True)
# FlashAttention 3, hopper/tile_size.h (causal): wgmma, warp specialised; packs where the queries are short.
_FLASH_3 = Design((64, 96, 128, 192, 256), ((192, 128), (192, 128), (128, 128), (128, 96), (128, 80)), packs=True)
# TensorRT-LLM, cpp/kernels/fmha_v2 (before Blackwell): no packing of grouped queries in the context phase.
_FMHA_V2 = Design((32, 64, 80, 96, 128, 192, 256), ((64, 128),) * 4 + ((64, 128), (64, 64), (64, 64)))
# Blackwell (FlashAttention 4, TensorRT-LLM's trtllm-gen): two tiles of 128 queries in tensor memory.
_TCGEN05 = Design((64, 96, 128, 192, 256), ((256, 128),) * 5)
# PyTorch, mem_eff_attention/kernels/cutlassF.h: heads up to 64 in registers, larger ones through shared memory.
_EFFICIENT = Design((32, 64, 128, 256), ((64, 64), (64, 64), (32, 128), (32, 128)))


def find_design(kernel: str, device: DeviceSpec) -> Design:
    """The generation of kernels that a library runs on a device."""
    major = (device.compute_capability or (8, 0))[0]
    if kernel == "efficient":
        return _EFFICIENT
    if kernel == "flash" or major < 9:
        return {"sglang": _FLASH_INFER, "trtllm": _FMHA_V2}.get(kernel, _FLASH_2)
    if kernel == "trtllm" and major == 9:
        return _FMHA_V2
    return _FLASH_3 if major == 9 else _TCGEN05


def count_blocks(q_len: int, kv_len: int, rows: float, block: int, causal: bool, window: int) -> tuple[float, float]:
    """Blocks of keys that a tile of ``rows`` queries reads: in the mean over tiles, and of the longest one.

    Tiles on the diagonal count whole, which is what kernels execute. A causal query sees the keys up to its own place
    counted from the end (``kv_len - q_len`` are older); a window of w limits it to the last w + 1 of them.

    >>> count_blocks(512, 512, 128, 128, causal=True, window=0)  # 1, 2, 3 and 4 blocks
    (2.5, 4.0)
    >>> count_blocks(512, 512, 128, 128, causal=False, window=0)
    (4.0, 4.0)
    >>> count_blocks(512, 512, 128, 128, causal=True, window=128)  # 1 for the first, 2 for the others
    (1.75, 2.0)
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
