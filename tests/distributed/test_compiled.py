"""Steps of ranks under torch.compile, blocks or whole models: bytes by hand, collectives as in the eager step."""
import gc
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.parallel import world
from tests.call import Call

ROWS, WIDTH, HIDDEN, BLOCKS, RANKS = 512, 256, 1024, 2, 8
MIB = 2**20
X = torch.zeros(ROWS, WIDTH)


class Block(nn.Module):
    """Saves what enters each product and, of the three functions between them, all in eager mode and one compiled."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.a = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.b = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.b(self.a(x).sin().cos().exp())


class NormBlock(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + super().forward(self.norm(x))


def blocks(how, kind=Block, count=BLOCKS):
    model = nn.Sequential(*[kind() for _ in range(count)]).cuda()
    for i, block in enumerate(model):
        if how == "block.compile()":
            block.compile(fullgraph=True)
        elif how == "torch.compile(block)":
            model[i] = torch.compile(block, fullgraph=True)
    return model


def fsdp2(how, count=BLOCKS):
    model = blocks(how, count=count)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch.compile(model) if how == "whole" else model


def tensor_parallel(how, sequence=False, shards=False):
    model = blocks(how, NormBlock)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    for block in model:
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        if sequence:
            plan = {"norm": SequenceParallel(sequence_dim=0), "a": ColwiseParallel(input_layouts=Shard(0)),
                    "b": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
        parallelize_module(block, mesh["tp"], plan)
        if shards:
            fully_shard(block, mesh=mesh["dp"])
    if sequence:
        parallelize_module(model, mesh["tp"], PrepareModuleInput(input_layouts=Replicate(),
                                                                 desired_input_layouts=Shard(0)))
    return model


def data_parallel(how):
    model = nn.parallel.DistributedDataParallel(blocks(how, NormBlock))
    return torch.compile(model) if how == "whole" else model


def fsdp1(how):
    model = FullyShardedDataParallel(blocks(how, NormBlock), auto_wrap_policy=ModuleWrapPolicy({NormBlock}),
                                     use_orig_params=True, device_id=0)
    return torch.compile(model) if how == "whole" else model


def run(build, *args, **options):
    with world(RANKS):
        return profile(lambda: build(*args), (X,), optimizer="adamw", device="h100", **options)


def collectives(p):
    return Counter((row.phase, row.kind, row.bytes, row.group) for row in p.comm)


@pytest.fixture(scope="module")
def eager():
    return run(fsdp2, "eager")


@pytest.mark.parametrize("how", ["block.compile()", "torch.compile(block)", "whole"])
def test_bytes_of_sharded_blocks(eager, how):
    p = run(fsdp2, how)
    # An eighth of the weights and of both of Adam's moments, the input, two workspaces of cuBLAS, and the loss.
    weights = BLOCKS * 2 * WIDTH * HIDDEN * 4 // RANKS
    held = 3 * weights + X.nbytes + 2 * 32 * MIB + 512
    # of 16 bits, what enters the products of each block, and what comes of the first; weights are gathered once more
    saved = BLOCKS * 2 * ROWS * (WIDTH + 2 * HIDDEN)
    between = BLOCKS * 2 * ROWS * HIDDEN  # sin and cos, eagerly
    assert p.step_phases["forward"].allocated_bytes == held + saved
    assert eager.step_phases["forward"].allocated_bytes == held + saved + between
    assert collectives(p) == collectives(eager)
    assert (p.fwd_flops, p.bwd_flops) != (None, None) and p.step_seconds < eager.step_seconds


def test_all_gathers_run_beside_compiled_blocks():
    many, one = (run(fsdp2, "block.compile()", count) for count in (6, 1))
    exposed, alone = (sum(row.exposed_seconds for row in p.comm) for p in (many, one))
    assert exposed < 6 * alone


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("sequence", "shards"), [(False, False), (True, False), (False, True), (True, True)])
def test_tensor_parallel_blocks(sequence, shards):
    p, eager = (run(tensor_parallel, how, sequence, shards) for how in ("block.compile()", "eager"))
    # The gradient of a sum is whole on each rank. That of the last block's output is laid out as AOTAutograd made the
    # backward graph for, as the output is: it is gathered again.
    gathered = {("backward", "all_gather", X.nbytes, "tp"): 1} if sequence else {}
    assert collectives(p) - collectives(eager) == gathered and not collectives(eager) - collectives(p)
    assert (p.params, p.optimizer_bytes) == (eager.params, eager.optimizer_bytes)  # which all have gradients
    assert any("fused" in row.operator for row in p.operators)


def test_what_is_held_by_an_error_that_torch_caught_is_no_result():
    # Of a root mean square norm DTensor has no rule for one operator: the error that it catches is in a cycle with the
    # frames that it went through, and training loops such as torchtitan's put the garbage collector off.
    class Rms(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)

        def forward(self, x):
            return x + super().forward(self.norm(x))

    def build(compiles):
        model = nn.Sequential(*[Rms() for _ in range(BLOCKS)]).cuda().bfloat16()
        mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("tp",))
        for block in model:
            parallelize_module(block, mesh, {
                "norm": SequenceParallel(sequence_dim=0), "a": ColwiseParallel(input_layouts=Shard(0)),
                "b": RowwiseParallel(output_layouts=Shard(0))})
            if compiles:
                block.compile(fullgraph=True)
        return model

    gc.disable()
    try:
        with world(RANKS):
            p, eager = [profile(partial(build, compiles), (X.bfloat16(),), optimizer="adamw", device="h100")
                        for compiles in (True, False)]
    finally:
        gc.enable()
    assert collectives(p) == collectives(eager) and any("fused" in row.operator for row in p.operators)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("build", [data_parallel, fsdp1])
@pytest.mark.parametrize("how", ["block.compile()", "whole"])
def test_other_wrappers(build, how):
    p, eager = run(build, how), run(build, "eager")
    total = [{key: sum(row.bytes for row in one.comm if (row.phase, row.kind) == key)
              for key in {(row.phase, row.kind) for row in one.comm}} for one in (p, eager)]
    assert total[0] == total[1]
    assert p.peak_allocated_bytes < eager.peak_allocated_bytes
    assert any("fused" in row.operator for row in p.operators)


def test_graphs_of_replicated_models_end_where_buckets_do():
    class Wide(nn.Sequential):
        def __init__(self):
            super().__init__(*[nn.Linear(2048, 2048) for _ in range(4)])

        def forward(self, x):
            return super().forward(x)

    def build():
        return torch.compile(nn.parallel.DistributedDataParallel(Wide().cuda()))

    with world(RANKS):
        p = profile(build, (torch.zeros(4096, 2048),), device="h100", optimizer="sgd")
    # Each layer has 16 MiB: the first bucket, of 1 MiB, is full with one of them, those of 25 MiB with two.
    assert [row.graphs for row in p.compiled] == [3]
    assert len(p.comm) == 3 and sum(row.bytes for row in p.comm) == 4 * 2048 * 2049 * 4
    assert all(row.exposed_seconds < row.seconds / 2 for row in p.comm[:-1])


@pytest.mark.parametrize(("waits", "graphs"), [(True, 1), (False, 2)])
def test_collectives_that_are_waited_for_are_in_the_graph(waits, graphs):
    def scatter(x):
        part, whole = x.new_empty(ROWS // RANKS, WIDTH), x * 2
        work = dist.reduce_scatter_tensor(part, whole, async_op=not waits)
        if work is not None:
            work.wait()
        return part + 1

    with world(RANKS):
        p = profile(torch.compile(Call(lambda m, x: scatter(x))), args=(X,), device="h100", mode="infer")
    call, = p.compiled
    assert call.graphs == graphs and [b.reason for b in call.breaks] == [
        "Dynamo takes no c10d._reduce_scatter_base_.default"] * (graphs - 1)
    row, = p.comm
    assert (row.kind, row.bytes) == ("reduce_scatter", ROWS * WIDTH * 4)


def test_some_blocks_run_for_many():
    some, every = run(fsdp2, "block.compile()", 14), run(fsdp2, "block.compile()", 14, reuse=False)
    assert [row.replayed for row in some.replay.rows].count(True) == 7  # four at the front and three at the end run
    assert some.compiled == every.compiled and len(some.compiled) == 14
    assert some.comm == every.comm and some.timeline == every.timeline and some.nodes == every.nodes
    assert some.step_seconds == every.step_seconds and some.peak_reserved_bytes == every.peak_reserved_bytes


def test_blocks_that_are_compiled_otherwise_are_all_run():
    def build():
        model = fsdp2("eager", 14)
        for i, block in enumerate(model):
            block.compile(dynamic=False if i == 5 else None)
        return model

    with world(RANKS):
        p = profile(build, (X,), device="h100")
    assert {row.reason for row in p.replay.rows} == {"no 10 neighbours in one of its lists of modules are alike"}
    assert len(p.compiled) == 14


def test_one_graph_does_not_go_through_what_gathers():
    def build():
        return torch.compile(fsdp2("eager"), fullgraph=True)

    with world(RANKS), pytest.raises(InputError, match=r"fullgraph=True.*FSDPSequential gathers parameters"):
        profile(build, (X,), device="h100")


def test_the_eager_step_on_request(eager):
    p = run(fsdp2, "whole", options=ProfileOptions(compiles=False))
    assert p.peak_allocated_bytes == eager.peak_allocated_bytes
    assert collectives(p) == collectives(eager) and not p.compiled
