"""FSDP1 and FSDP2 with their settings, around a small GPT-2: bytes of a rank as they follow by hand.

``P`` elements are in the model, ``BLOCK`` in each of its 4 blocks, ``ROOT`` in the rest, which the root wraps. AdamW
keeps two states, all in float32. A rank that holds ``p`` elements has gradients of 4p bytes and states of 8p, and a
step count of 4 bytes for each tensor. The peak of one device is in the backward pass of the last block, where few
gradients are there: what a wrapper leaves to others of parameters and states is less of it, what it holds more.
"""
import importlib
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch as Prefetch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

from analyzer.parallel import world
from analyzer.results.world import find_parallel_sizes
from tests.distributed.data_parallel_model import (
    BLOCK,
    HIDDEN,
    LAYERS,
    POSITIONS,
    ROOT,
    TENSORS,
    VOCABULARY,
    P,
    Run,
    accumulate,
    gpt2,
    one,
    scale,
    shared_run,
)

pytestmark = pytest.mark.filterwarnings("ignore")
EMBEDDINGS = (VOCABULARY + POSITIONS) * HIDDEN
HALF = torch.bfloat16


def fsdp1(mesh=None, **settings):
    def build():
        model = gpt2()
        given = {"use_orig_params": True, "device_id": 0, **settings}
        given.setdefault("auto_wrap_policy", ModuleWrapPolicy({type(model.transformer.h[0])}))
        if mesh is not None:
            given["device_mesh"] = init_device_mesh("cuda", mesh)
        return FullyShardedDataParallel(model, **given)
    return build


def fsdp2(mesh=(8,), prepare=lambda model: {}, model=gpt2, prefetch=0, **settings):
    def build():
        made = model()
        given = {**settings, "mesh": init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh):])}
        given.update(prepare(made))
        blocks = list(made.transformer.h)
        for block in blocks:
            fully_shard(block, **{k: v for k, v in given.items() if k != "ignored_params"})
        for i, block in enumerate(blocks if prefetch else ()):
            block.set_modules_to_forward_prefetch(blocks[i + 1:i + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch):i][::-1])
        return fully_shard(made, **given)
    return build


def checkpointed():
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def freezing(model):
    model.transformer.h[:2].requires_grad_(False)
    return {}


def ignoring_embeddings(model):
    return {"ignored_params": {model.transformer.wte.weight, model.transformer.wpe.weight}}


def accumulate_fsdp2(model, optimizer, **inputs):
    model.set_requires_gradient_sync(False)
    model(**inputs).loss.backward()
    model.set_requires_gradient_sync(True)
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


FSDP1, FSDP2 = fsdp1(), fsdp2()
GATHERED_AGAIN = P - ROOT  #: by the backward pass: the root stays gathered
U = 4 * (ROOT + 2 * BLOCK)  #: gathered at the peak: the root, the last block, and the one before it in advance
S = 8  #: ranks that share a model, unless there are fewer
# Of each: how many ranks share the model, elements that are gathered in forward, in backward, reduced and scattered,
# all-reduced, and what is held at the peak beside a rank's share, in bytes; None where the peak is another's.
FSDP = {
    "fsdp1": (FSDP1, {}, S, P, GATHERED_AGAIN, P, 0, U),
    "fsdp1 flat": (fsdp1(use_orig_params=False), {}, S, P, GATHERED_AGAIN, P, 0, U),
    "fsdp1 SHARD_GRAD_OP": (fsdp1(sharding_strategy=Strategy.SHARD_GRAD_OP), {}, S, P, 0, P, 0, 4 * P),
    "fsdp1 NO_SHARD": (fsdp1(sharding_strategy=Strategy.NO_SHARD), {}, 1, 0, 0, 0, P, 0),
    "fsdp1 HYBRID_SHARD": (fsdp1((2, 4), sharding_strategy=Strategy.HYBRID_SHARD), {}, 4, P, GATHERED_AGAIN, P, P // 4,
                           U),
    "fsdp1 ZERO2": (fsdp1((2, 4), sharding_strategy=Strategy._HYBRID_SHARD_ZERO2), {}, 4, P, 0, P, P // 4, 4 * P),
    "fsdp1 prefetch after": (fsdp1(backward_prefetch=Prefetch.BACKWARD_POST), {}, S, P, GATHERED_AGAIN, P, 0,
                             U - 4 * BLOCK),
    "fsdp1 forward prefetch": (fsdp1(forward_prefetch=True, limit_all_gathers=False, sync_module_states=True), {}, S, P,
                               GATHERED_AGAIN, P, 0, U),
    # gradients of both micro-batches are added up whole, and each gathers all anew
    "fsdp1 accumulation": (fsdp1(), {"step": accumulate}, S, 2 * P, 2 * GATHERED_AGAIN, P, 0, U + 4 * P),
    "fsdp2": (FSDP2, {}, S, P, GATHERED_AGAIN, P, 0, U),
    "fsdp2 fused": (fsdp2(), {"optimizer": "adamw_fused"}, S, P, GATHERED_AGAIN, P, 0, None),
    "fsdp2 root again": (fsdp2(reshard_after_forward=True), {}, S, P, P, P, 0, U),
    # pairs of ranks keep all blocks after forward: half of each; that of the last one is gathered at the peak
    "fsdp2 reshard to 2": (fsdp2(reshard_after_forward=2), {}, S, P, P, P, 0, U + 3 * 4 * BLOCK // 2),
    "fsdp2 HSDP": (fsdp2((2, 4)), {}, 4, P, GATHERED_AGAIN, P, P // 4, U),
    "fsdp2 prefetch of 2": (fsdp2(prefetch=2), {}, S, P, GATHERED_AGAIN, P, 0, U + 4 * BLOCK),
    "fsdp2 accumulation": (fsdp2(), {"step": accumulate_fsdp2}, S, 2 * P, 2 * GATHERED_AGAIN, P, 0, None),
    "fsdp2 checkpointing": (fsdp2(model=checkpointed), {}, S, P, GATHERED_AGAIN, P, 0, None),
    "fsdp2 other dimension": (fsdp2(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0)), {}, S, P,
                              GATHERED_AGAIN, P, 0, None),
    "fsdp2 frozen": (fsdp2(prepare=freezing), {}, S, P, GATHERED_AGAIN, P - 2 * BLOCK, 0, None)}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("case", FSDP)
def test_fsdp_gathers_and_scatters(case):
    build, settings, shares, forward, backward, scattered, reduced, held = FSDP[case]
    run = Run(build, **settings) if settings else shared_run(build)
    p = run.profile
    assert (p.params, p.whole_params, p.param_bytes) == (P // shares, P, 4 * P // shares)
    counters = 4 * 52 * (case == "fsdp2 fused")  # one for each parameter, which a fused AdamW keeps on the device
    assert p.optimizer_bytes == 8 * (P - 2 * BLOCK * (case == "fsdp2 frozen")) // shares + counters
    assert run.comm("forward") == 4 * forward
    assert [run.comm("backward", kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [
        4 * backward, 4 * scattered, 4 * reduced]
    if held is not None:
        assert run.peak == one().peak - 12 * (P - P // shares) + held
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert "held by the model" not in p.peak_by_category


@pytest.mark.parametrize("build", [FSDP1, FSDP2], ids=["fsdp1", "fsdp2"])
def test_what_is_gathered_has_a_name_at_the_peak(build):
    held, plain = shared_run(build).profile.peak_by_category, one().profile.peak_by_category
    gathered = held["unsharded parameter"] + held.get("communication buffer", 0)  # FSDP2 copies out of its buffer
    assert U <= gathered < U + 512 * TENSORS
    assert held["activation"] == plain["activation"]
    assert shared_run(build).profile.modules.saved_bytes == one().profile.modules.saved_bytes


@pytest.mark.parametrize("build", [
    fsdp1(mixed_precision=MixedPrecision(HALF, torch.float32)),
    fsdp2(mp_policy=MixedPrecisionPolicy(HALF, torch.float32))], ids=["fsdp1", "fsdp2"])
def test_mixed_precision_gathers_half_and_reduces_whole(build):
    run = Run(build)
    assert run.comm("forward") == 2 * P and run.comm("backward", "all_gather") == 2 * GATHERED_AGAIN
    assert run.comm("backward", "reduce_scatter") == 4 * P and run.profile.param_bytes == 4 * P // 8


def test_what_is_offloaded_is_on_the_host():
    second = Run(fsdp2(offload_policy=CPUOffloadPolicy()))
    first = Run(fsdp1(cpu_offload=CPUOffload(True)))
    assert second.peak == one().peak - 12 * P + U
    assert first.peak == second.peak + 4 * (ROOT + 2 * BLOCK) // 8  # shards are copied to the device before
    for run in (first, second):
        assert run.profile.param_bytes == 4 * P // 8 and "parameter" not in run.profile.peak_by_category
        assert not {"optimizer state", "gradient"} & set(run.profile.peak_by_category)
        assert 16 * P // 8 < run.profile.host_peak_bytes < 24 * P // 8  # parameters, gradients, two states


def test_what_nothing_shards_is_whole_on_each_rank():
    run = Run(fsdp2(prepare=ignoring_embeddings), optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert run.profile.params == EMBEDDINGS + (P - EMBEDDINGS) // 8 and run.profile.whole_params == P
    assert run.comm("forward") == 4 * (P - EMBEDDINGS)


def padded(ranks):
    """Elements of a rank's shards, a whole block and the whole root, where first dimensions are padded to ``ranks``."""
    def shard(rows, columns=1):
        return -(-rows // ranks) * columns

    h = HIDDEN
    block = (shard(h, 3 * h) + shard(h, h) + shard(h, 4 * h) + shard(4 * h, h)  # Conv1D keeps inputs x outputs
             + shard(3 * h) + shard(4 * h) + 6 * shard(h))
    root = shard(VOCABULARY, h) + shard(POSITIONS, h) + 2 * shard(h)
    return LAYERS * block + root, ranks * block, ranks * root


@pytest.mark.parametrize("ranks, rank", [(7, 0), (512, 0), (512, 511)])
def test_uneven_shards_are_padded(ranks, rank):
    share, block, root = padded(ranks)
    run = Run(fsdp2((ranks,)), ranks, rank)
    assert run.profile.param_bytes == 4 * share  # with the padding
    assert run.comm("forward") == 4 * (LAYERS * block + root)
    assert run.comm("backward") == 4 * (2 * LAYERS * block + root)
    if rank == 0:  # which no shard leaves out: gradients and states have no padding
        assert run.peak == one().peak - 12 * (P - share) + 4 * (root + 2 * block)
    # The last has a row of what has 512 rows or a multiple (embedding, MLP output) and an element of such biases.
    else:
        assert run.profile.params == HIDDEN * 2 + LAYERS * 2 * HIDDEN + LAYERS * 2


def clip(model, optimizer, **inputs):
    model(**inputs).loss.backward()
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("build", [fsdp1(), fsdp2()], ids=["fsdp1", "fsdp2"])
def test_norms_of_shards_are_added_up(build):
    """FSDP1 adds up one number; torch's own function on DTensors those of all tensors, in one call (torch 2.9 takes the
    norm of a rank's norms first).
    """
    run = Run(build, step=clip)
    bytes_, = [row.bytes for row in run.profile.comm if row.kind == "all_reduce"]
    is_one = run.profile.modules.type == "FullyShardedDataParallel" or torch.__version__ < (2, 10)
    assert bytes_ == (4 if is_one else 4 * TENSORS)


@pytest.mark.parametrize("build, scaler", [(fsdp1(), ShardedGradScaler), (fsdp2(), torch.amp.GradScaler)])
def test_gradients_are_scaled_and_no_step_is_skipped(build, scaler):
    assert Run(build, step=scale([scaler])).profile.optimizer_bytes == 8 * P // 8


STUB = """
def validate_uneven_dtensor(tensor):
    raise AssertionError("asked the other ranks")


class FullyShardedDataParallel(torch.nn.Linear):
    def sync_rng_states_across_tp_group(self):
        raise AssertionError("asked the other ranks")
"""


def test_megatron_fsdp_asks_nothing_of_ranks_that_do_not_run(tmp_path, monkeypatch):
    """Whether it is imported in the world or before; the count of ranks knows its wrapper from torch's of its name."""
    places = ("megatron_fsdp.param_and_grad_buffer", "megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    for place in places:
        path = tmp_path.joinpath(*place.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(f"import torch\n{STUB}")
        for folder in list(path.relative_to(tmp_path).parents)[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = [".".join(place.split(".")[:n]) for place in places for n in range(1, place.count(".") + 2)]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for _ in range(2):
        with world(4, rank=3):
            check, adapter = map(importlib.import_module, places)
            wrapper = adapter.FullyShardedDataParallel(4, 4)
            assert check.validate_uneven_dtensor(None) is None
            assert wrapper.sync_rng_states_across_tp_group() is None
            assert find_parallel_sizes(wrapper)["data_parallel_size"] is None
        for asks, given in ((check.validate_uneven_dtensor, [None]), (wrapper.sync_rng_states_across_tp_group, [])):
            with pytest.raises(AssertionError, match="asked the other ranks"):
                asks(*given)
    for name in names:
        sys.modules.pop(name, None)
