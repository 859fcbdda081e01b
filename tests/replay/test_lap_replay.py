"""Of a sharded model's like blocks some are run: what the log says of the others is what running them says."""
from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import profile
from analyzer.parallel import world

BLOCKS, WIDTH = 12, 64


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ReadsIndex(Block):
    def forward(self, x):
        return super().forward(x) * (1 if self.index < 100 else 2)


class HoldsFunction(Block):
    """Its function names a variable that is never set."""

    def __init__(self, index):
        super().__init__(index)
        self.find = lambda: later
        if index < 0:
            later = index


class Model(nn.Module):
    def __init__(self, block=Block, count=BLOCKS):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
        self.blocks = nn.ModuleList([block(i) for i in range(count)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fsdp2(block=Block, mesh=None, checkpoint=False, prefetch=False, last=True, **settings):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = Model(block).cuda()
    if mesh is not None:
        settings["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard"))
    for i, inner in enumerate(model.blocks):
        if checkpoint:
            model.blocks[i] = inner = checkpoint_wrapper(inner)
        fully_shard(inner, reshard_after_forward=last or i < BLOCKS - 1, **settings)
    if prefetch:
        for inner, following in zip(model.blocks, model.blocks[1:]):
            inner.set_modules_to_forward_prefetch([following])
    return fully_shard(model, **settings)


def reduced(**settings):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    return fsdp2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **settings)


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model, mesh = Model().cuda(), init_device_mesh("cuda", (8,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model, mesh = Model().cuda(), init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    return FullyShardedDataParallel(Model().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0)


def two_groups(parameters):
    parameters = list(parameters)
    return torch.optim.RMSprop([{"params": [p for p in parameters if p.ndim > 1]},
                                {"params": [p for p in parameters if p.ndim < 2], "lr": 1e-4}], foreach=False)


def decaying(parameters):
    return torch.optim.SGD([{"params": [p], "lr": 0.9 ** i} for i, p in enumerate(parameters)])


def accumulate(model, optimizer, tokens):
    for _ in range(2):
        model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(build, reuse, **settings):
    with world(8):
        return profile(build, args=(torch.zeros(2, 16, dtype=torch.int64),), reuse=reuse,
                       **{"optimizer": "adamw", "device": "h200", **settings})


def without_replay(p):
    data = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    del data["replay"]
    return data


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "settings"), [
    (fsdp2, {}), (reduced, {}), (lambda: reduced(last=False), {}), (lambda: fsdp2(mesh=(2, 4)), {}),
    (lambda: reduced(mesh=(2, 4)), {}), (lambda: fsdp2(checkpoint=True), {}), (fsdp2, {"step": accumulate}),
    (tensor_parallel, {"optimizer": lambda p: torch.optim.AdamW(p, foreach=False)}),
    (sharded_tensor_parallel, {}), (fsdp2, {"optimizer": "adamw_fused"}), (fsdp2, {"optimizer": None}),
    (fsdp2, {"optimizer": two_groups}), (fsdp2, {"optimizer": torch.optim.Adagrad}), (fsdp2, {"optimizer": decaying}),
    (fsdp2, {"optimizer": None, "mode": "infer"}), (lambda: fsdp2(HoldsFunction), {"optimizer": None}),
], ids=["fp32", "bf16", "last_stays", "hsdp", "hsdp_bf16", "checkpointed", "accumulating", "tensor_parallel",
        "sharded_tensor_parallel", "fused", "no_optimizer", "two_groups", "states_from_the_start",
        "rate_by_depth", "inference", "closure_that_is_not_set"])
def test_replayed_is_run(build, settings):
    replayed, whole = run(build, True, **settings), run(build, False, **settings)
    assert [row.path.rpartition(".")[2] for row in replayed.replay if row.replayed] == [
        str(i) for i in range(4, 9)]
    assert without_replay(replayed) == without_replay(whole)


@pytest.mark.filterwarnings("ignore")
def test_what_was_assumed_of_the_run_is_told():
    replayed = run(fsdp2, True, device="mi300x")
    assert any("kernels on mi300x are taken to be those of CUDA" in text for text in replayed.assumptions)
    assert any(row.replayed for row in replayed.replay)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "reason"), [
    (lambda: fsdp2(ReadsIndex), "its blocks read index, in which they differ"),
    (lambda: fsdp2(prefetch=True), "its blocks prefetch blocks that are named"),
    (fsdp1, "FullyShardedDataParallel holds the blocks' parameters in buffers of its own"),
    (lambda: Model(count=11).cuda(), "no list of 12 or more blocks"),
])
def test_what_is_not_known_to_be_periodic_is_run(build, reason):
    replayed, whole = run(build, True), run(build, False)
    assert [(row.replayed, row.reason) for row in replayed.replay] == [(False, reason)]
    assert without_replay(replayed) == without_replay(whole)


def accumulate_and_look(model, optimizer, tokens):
    accumulate(model, optimizer, tokens)
    torch.cuda.memory_allocated()


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_asks_for_memory_in_use_is_run():
    replayed = run(fsdp2, True, step=accumulate_and_look)
    assert [row.reason for row in replayed.replay] == ["a step asks how much memory is in use, or gives it back"]
