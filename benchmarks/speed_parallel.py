"""Prints what ranks of sharded models cost to profile: `python -m benchmarks.speed_parallel`, for docs/performance.md.

Seconds are of the processor. The first profile of a process, which imports and fills caches, is left out.
"""
from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer import Profile, profile
from analyzer.parallel import world

MASKED_SHARE = 0.75  # of the patches: He et al., Masked Autoencoders Are Scalable Vision Learners, 2021


class Block(nn.Module):
    """A transformer's block: attention and an MLP of four times the width, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch of sequences."""
        q, k, v = (t.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class Stack(nn.Module):
    """Blocks alone."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch of sequences."""
        for block in self.blocks:
            x = block(x)
        return x


class MaskedImageModel(nn.Module):
    """A masked autoencoder of images of 224 x 224 in patches of 14 x 14: 16.9 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.encoder = nn.Conv2d(3, 6144, 14, 14), Stack(37, 6144, 48)
        self.narrow, self.decoder, self.pixels = nn.Linear(6144, 1024), Stack(8, 1024, 16), nn.Linear(1024, 588)
        self.mask = nn.Parameter(torch.zeros(1, 1, 1024))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The pixels of all patches."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        seen = int(x.shape[1] * (1 - MASKED_SHARE))
        y = self.narrow(self.encoder(x[:, :seen]))
        hidden: torch.Tensor = self.pixels(self.decoder(torch.cat([
            y, self.mask.expand(len(x), x.shape[1] - seen, -1)], 1)))
        return hidden


def shard(model: Any, lists: list[nn.ModuleList]) -> nn.Module:
    """FSDP2 around each block, in bfloat16 with gradients reduced in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (block for blocks in lists for block in blocks):
        fully_shard(block, mp_policy=policy)
    sharded: nn.Module = fully_shard(model, mp_policy=policy)
    return sharded


def masked_image() -> nn.Module:
    """The masked autoencoder under FSDP2."""
    model = MaskedImageModel().cuda()
    return shard(model, [model.encoder.blocks, model.decoder.blocks])


def stack(depth: int, wrapper: str) -> Callable[[], nn.Module]:
    """What builds a stack of blocks of width 2048 under a wrapper."""
    def build() -> nn.Module:
        model = Stack(depth, 2048, 32).cuda()
        if wrapper == "DDP":
            return nn.parallel.DistributedDataParallel(model)
        if wrapper == "FSDP1":
            return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0,
                                            use_orig_params=True)
        if wrapper == "FSDP2":
            return shard(model, [model.blocks])
        if wrapper == "tensor parallel (MLP)":
            mesh = init_device_mesh("cuda", (8,))
            for block in model.blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    return build


def measure(build: Callable[[], nn.Module], size: int, sample: Any, reuse: bool = True) -> tuple[float, Profile]:
    """Seconds of a profile, and it."""
    start = time.process_time()
    with world(size):
        p = profile(build, args=(sample,), device="h200", reuse=reuse, optimizer="adamw")
    return time.process_time() - start, p


def main() -> None:
    """Print the tables."""
    sample = torch.empty(4, 512, 2048, device="meta")
    print("| wrapper | 16 blocks, run | 64 blocks, run | replayed | a further block, run | replayed |\n"
          "|---|--:|--:|--:|--:|--:|")
    for wrapper in ("none", "DDP", "FSDP1", "FSDP2", "tensor parallel (MLP)"):
        measure(stack(16, wrapper), 8, sample, False)
        run16, run64 = (measure(stack(depth, wrapper), 8, sample, False)[0] for depth in (16, 64))
        (played16, _), (played64, p) = (measure(stack(depth, wrapper), 8, sample) for depth in (16, 64))
        is_played = any(row.replayed for row in p.replay or ())
        further = f"{(played64 - played16) / 48 * 1e3:.0f} ms" if is_played else "-"
        print(f"| {wrapper} | {run16:.2f} s | {run64:.2f} s | {f'{played64:.2f} s' if is_played else '-'} | "
              f"{(run64 - run16) / 48 * 1e3:.0f} ms | {further} |", flush=True)
    start = time.perf_counter()
    seconds, p = measure(masked_image, 64, torch.empty(4, 3, 224, 224, device="meta"))
    print(f"\nmasked autoencoder, {p.whole_params:,} parameters, FSDP2 on 64 ranks: {seconds:.1f} s of the processor, "
          f"{time.perf_counter() - start:.1f} s; {p.param_bytes:,} bytes of parameters a rank; process at most "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    main()
