"""A Llama of 16 layers (1,235,814,400 parameters, head tied) under FSDP2, HSDP and ZeRO-1, four sequences of 1024,
AdamW, in float32: bytes of a rank as they follow by hand, its peak from that of one device.
"""
from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.data_parallel_model import Run

pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN, VOCABULARY, LAYERS = 2048, 128256, 16
EMBEDDING = VOCABULARY * HIDDEN
# Queries and output; keys and values of 8 of the 32 heads; gate, up and down; two norms. All rows divide by 64.
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN**2 // 4 + 3 * 8192 * HIDDEN + 2 * HIDDEN
ROOT = EMBEDDING + HIDDEN
P = LAYERS * LAYER + ROOT
IDS = torch.zeros(4, 1024, dtype=torch.int64)
INPUTS = {"kwargs": {"input_ids": IDS, "labels": IDS.clone()}}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=8192, num_hidden_layers=LAYERS, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False)
    return LlamaForCausalLM(config).train().to("cuda")


def fsdp2(*mesh, **settings):
    def build():
        model = llama()
        given = {**settings, "mesh": init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh):])}
        for layer in model.model.layers:
            fully_shard(layer, **given)
        return fully_shard(model, **given)
    return build


@cache
def one():
    return Run(llama, 1, **INPUTS)


# Of each: ranks in all, and that share the model; the bytes of an element that is gathered.
CASES = {"8": (fsdp2(8), 8, 8, 4), "64": (fsdp2(64), 64, 64, 4), "HSDP": (fsdp2(2, 4), 8, 4, 4),
         "bf16": (fsdp2(64, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), 64, 64, 2)}


@pytest.mark.parametrize("case", CASES)
def test_fsdp2(case):
    build, size, shares, width = CASES[case]
    run = Run(build, size, **INPUTS)
    p, share = run.profile, P // shares
    assert (p.params, p.whole_params, p.param_bytes) == (share, P, 4 * share)
    assert p.optimizer_bytes == 8 * share
    assert run.comm("forward") == width * P
    assert [run.comm("backward", kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [
        width * (P - ROOT), 4 * P, 4 * share * (shares < size)]
    if width == 4:  # the backward pass begins with the root gathered, and the last layer in advance
        assert run.peak == one().peak - 12 * (P - share) + 4 * (ROOT + LAYER)


def test_zero_1():
    """The embedding is more than an eighth of the model: rank 0 has the states of it alone."""
    run = Run(lambda: DistributedDataParallel(llama()), optimizer=lambda p: ZeroRedundancyOptimizer(
        p, torch.optim.AdamW, lr=1e-4), **INPUTS)
    p = run.profile
    assert (p.params, p.param_bytes, p.optimizer_bytes) == (P, 4 * P, 8 * EMBEDDING)
    assert (run.comm("backward", "all_reduce"), run.comm("optimizer", "broadcast")) == (4 * P, 4 * P)
    assert run.peak == one().peak + 4 * P - 8 * (P - EMBEDDING)
