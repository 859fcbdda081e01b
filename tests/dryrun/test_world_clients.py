"""DeepSpeed, Megatron-core and torchtitan, whose own code runs as one rank of eight: optional, none is in the
environment of development (PYTHONPATH may point to a folder that holds them and what they import).
"""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from analyzer import Profile
from analyzer.tools.dryrun.job import dry_run_ranks

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, rank: int, *arguments: str) -> Profile:
    done = dry_run_ranks(SCRIPTS / script, arguments, size=8, ranks=[rank])
    assert done.failed_rank is None, done.results[rank].error
    return done.table.profiles[rank]


def sum_comm(p: Profile, kind: str, phase: str, least: int = 64) -> int:
    """Bytes of the calls of a kind, without flags and norms."""
    return sum(row.bytes or 0 for row in p.comm or ()
               if (row.kind, row.phase) == (kind, phase) and (row.bytes or 0) >= least)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage):
    pytest.importorskip("deepspeed")
    p = run("deepspeed_zero.py", 3, str(stage))
    params = 4 * (256 * 1024 + 1024 + 1024 * 256 + 256)
    assert p.param_bytes == (2 * params // 8 if stage == 3 else 2 * params)  # bfloat16, partitioned by stage 3
    assert p.optimizer_bytes == 8 * params // 8 + 4  # moments in float32 of the part, which is one flat tensor
    assert sum_comm(p, "all_gather", "forward") == 2 * params
    # gradients are reduced when backward has ended: by an all-reduce of which each keeps its part, or scattered
    assert sum_comm(p, "reduce_scatter" if stage == 3 else "all_reduce", "optimizer") == 2 * params


def test_megatron_tensor_parallel():
    pytest.importorskip("megatron.core")
    p = run("megatron_gpt.py", 5)
    # a quarter of: attention, feed-forward and their column-wise biases; whole: row-wise biases, norms, positions
    layer = (4 * 256 * 256 + 3 * 256 + 2 * 4 * 256 * 256 + 4 * 256) // 4 + 2 * 256 + 4 * 256
    assert p.param_bytes == 2 * (2 * 1024 * 256 // 4 + 128 * 256 + 2 * layer + 2 * 256)
    activation = 2 * 4 * 128 * 256
    # the embedding's sum and two of a layer; then three of float32 in the loss, which is split by vocabulary
    assert sum_comm(p, "all_reduce", "forward") == 5 * activation + 3 * 4 * 4 * 128
    assert sum_comm(p, "all_reduce", "backward") == 5 * activation  # two of a layer, and the output's
    assert {row.group for row in p.comm or ()} == {"TENSOR_MODEL_PARALLEL_GROUP"}


def test_torchtitan_sharded_and_tensor_parallel():
    for name in ("torchtitan", "triton", "torchdata", "tensorboard"):  # the last three it imports, for other models too
        pytest.importorskip(name)
    if importlib.util.find_spec("torchtitan.protocols.train_spec") is None:
        pytest.skip("torchtitan 0.2 is meant, whose train_spec is not there")
    p = run("torchtitan_llama.py", 5)
    layers, tokens = 6, 2 * 256
    matrices = 2 * 2048 * 256 + layers * (4 * 256 * 256 + 3 * 256 * 768)
    norms = (2 * layers + 1) * 256  # are sharded, but whole in each rank of tensor parallelism
    part = matrices // 2 + norms
    tensors = 9 * layers + 3
    assert (p.param_bytes, p.optimizer_bytes) == (4 * part // 4, 8 * part // 4 + 4 * tensors)
    found = {(row.group, row.kind, row.phase): 0 for row in p.comm or ()}
    for row in p.comm or ():
        found[row.group, row.kind, row.phase] += row.bytes or 0
    assert found["fsdp", "all_gather", "forward"] == 2 * part        # in bfloat16
    assert found["fsdp", "reduce_scatter", "backward"] == 4 * part   # in float32
    # sequence parallel: the embedding's sum and two of a layer are scattered, two of a layer and the head's gathered
    for phase in ("forward", "backward"):
        assert found["tp", "reduce_scatter", phase] == found["tp", "all_gather", phase] == (
            (2 * layers + 1) * 2 * tokens * 256), phase
