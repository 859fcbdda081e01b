"""Prints what ranks of sharded models cost to profile: `python -m benchmarks.speed_parallel`, for docs/performance.md.

Seconds are of the processor. The first profile of a process, which imports and fills caches, is left out. What building
and wrapping the model takes, by the caller's own code, is told apart: it is the same where blocks are replayed.
"""
from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer import Profile, profile
from analyzer.parallel import world

ROUNDS = 3
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


def shard(model: Any, lists: list[nn.ModuleList], mesh: DeviceMesh | None = None) -> nn.Module:
    """FSDP2 around each block, in bfloat16 with gradients reduced in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (block for blocks in lists for block in blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
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
        if wrapper == "FSDP2 and tensor parallel":
            both = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
            for block in model.blocks:
                parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            return shard(model, [model.blocks], mesh=both["data"])
        if wrapper == "tensor parallel (MLP)":
            mesh = init_device_mesh("cuda", (8,))
            for block in model.blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    return build


class Cost(NamedTuple):
    """Seconds of the processor that a profile takes: to build and wrap the model, by the caller's code, and all else;
    whether blocks were replayed.
    """

    building: float
    rest: float
    is_replayed: bool


def measure(build: Callable[[], nn.Module], size: int, sample: Any, reuse: bool = True) -> tuple[Cost, Profile]:
    """What a profile costs, and it."""
    building = 0.0

    def timed() -> nn.Module:
        nonlocal building
        start = time.process_time()
        model = build()
        building += time.process_time() - start
        return model

    start = time.process_time()
    with world(size):
        p = profile(timed, args=(sample,), device="h200", reuse=reuse, optimizer="adamw")
    seconds = time.process_time() - start
    return Cost(building, seconds - building, any(row.replayed for row in p.replay or ())), p


def row_of(wrapper: str, sample: Any) -> str:
    """The row of a wrapper: what a further block costs, the median of `ROUNDS` in each of which all is measured."""
    measure(stack(16, wrapper), 8, sample, False)
    rounds = [{(reuse, depth): measure(stack(depth, wrapper), 8, sample, reuse)[0] for reuse in (False, True)
               for depth in (16, 64)} for _ in range(ROUNDS)]
    further = [{(reuse, name): (getattr(found[reuse, 64], name) - getattr(found[reuse, 16], name)) / 48
                for reuse in (False, True) for name in ("building", "rest")} for found in rounds]

    def milliseconds(reuse: bool, name: str) -> str:
        return f"{median(found[reuse, name] for found in further) * 1e3:.1f}"

    def ratio(*names: str) -> str:
        return f"{median(sum(f[True, n] for n in names) / sum(f[False, n] for n in names) for f in further):.2f}"

    whole, replayed = (median(sum(found[reuse, 64][:2]) for found in rounds) for reuse in (False, True))
    columns = [wrapper, f"{whole:.2f} s", "-", milliseconds(False, "building"), milliseconds(False, "rest"),
               *("-" for _ in range(3))]
    if rounds[0][True, 64].is_replayed:
        columns[2], columns[5:] = f"{replayed:.2f} s", [
            milliseconds(True, "rest"), ratio("rest"), ratio("building", "rest")]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Print the tables."""
    sample = torch.empty(4, 512, 2048, device="meta")
    print("| wrapper | 64 blocks, run | replayed | a further block, ms: built | run | replayed | replayed to run | "
          "with building |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    for wrapper in ("none", "DDP", "FSDP1", "FSDP2", "tensor parallel (MLP)", "FSDP2 and tensor parallel"):
        print(row_of(wrapper, sample), flush=True)
    start = time.perf_counter()
    cost, p = measure(masked_image, 64, torch.empty(4, 3, 224, 224, device="meta"))
    print(f"\nmasked autoencoder, {p.whole_params:,} parameters, FSDP2 on 64 ranks: "
          f"{sum(cost[:2]):.1f} s of the processor, {time.perf_counter() - start:.1f} s; "
          f"{p.param_bytes:,} bytes of parameters a rank; process at most "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    main()
