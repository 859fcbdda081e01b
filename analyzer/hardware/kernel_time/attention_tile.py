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
      sequences fill it. ``short_rows``: smaller tiles that it has for fewer rows. ``decode_group``: the most heads
      that it packs when decoding, if there is such a limit.
    - ``generation``: the instructions of its matrix products, which make its constants.
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
FLASH_2 = Design(
    MMA, (32, 64, 96, 128, 192, 256), ((128, 128), (128, 128), (128, 64), (128, 64), (128, 64), (64, 64)),
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
