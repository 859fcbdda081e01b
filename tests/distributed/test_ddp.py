"""DDP and ZeRO-1 with their settings, around a small GPT-2: bytes of a rank as they follow by hand.

See test_fsdp.py.
"""
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.distributed.data_parallel_model import (
    HIDDEN,
    LAYERS,
    POSITIONS,
    TENSORS,
    VOCABULARY,
    Normed,
    P,
    Run,
    accumulate,
    gpt2,
    one,
    shared_run,
)

pytestmark = pytest.mark.filterwarnings("ignore")
HALF = torch.bfloat16


def ddp(hook=None, model=gpt2, **settings):
    def build():
        wrapped = DistributedDataParallel(model(), **settings)
        if hook is not None:
            wrapped.register_comm_hook(*hook())
        return wrapped
    return build


def built_in_hook():
    wrapped = ddp()()
    wrapped._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    return wrapped


def ignoring():
    model = gpt2()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["transformer.wte.weight", "lm_head.weight"])
    return DistributedDataParallel(model)


def replicated():
    from torch.distributed._composable.replicate import replicate
    return replicate(gpt2())


def reentrant():
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return DistributedDataParallel(model, static_graph=True)


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook


PLAIN, VIEWS = ddp(), ddp(gradient_as_bucket_view=True)
# PowerSGD of rank 1 sends a row and a column of each matrix, and all of each vector.
MATRICES = LAYERS * (4 + 2 + 5 + 5) * HIDDEN + VOCABULARY + HIDDEN + POSITIONS + HIDDEN
VECTORS = (13 * LAYERS + 2) * HIDDEN
# Of each: what the backward pass reduces, in bytes, and how many buckets there are: the first to be filled is closed at
# 1 MiB, others at 25 MiB, or each at bucket_cap_mb (torch/nn/parallel/distributed.py, ``_BucketCapacityConfig``).
DDP = {
    "plain": (PLAIN, {}, 4 * P, 2),
    "buckets of 100 MiB": (ddp(bucket_cap_mb=100), {}, 4 * P, 1),
    "views": (VIEWS, {}, 4 * P, 2),
    "static graph": (ddp(static_graph=True), {}, 4 * P, 2),
    # one integer for each parameter, whether it was used; buckets stay as they were at first, one of all
    "unused parameters": (ddp(find_unused_parameters=True), {}, 4 * P + 4 * TENSORS, 3),
    "accumulation": (ddp(), {"step": accumulate}, 4 * P, 2),
    "fp16 hook": (ddp(lambda: (None, default_hooks.fp16_compress_hook)), {}, 2 * P, 2),
    "built-in fp16 hook": (built_in_hook, {}, 2 * P, 2),
    # of each bucket the vectors, then rows, then columns
    "PowerSGD": (ddp(power_sgd), {}, 4 * (MATRICES + VECTORS), 6),
    # tied parameters have a hook of each module, and torch refuses that
    "mixed precision": (ddp(model=partial(gpt2, tie_word_embeddings=False),
                            mixed_precision=_MixedPrecision(HALF, HALF)), {}, 2 * (P + VOCABULARY * HIDDEN), 2),
    "ignored parameters": (ignoring, {}, 4 * (P - VOCABULARY * HIDDEN), 2),
    "composable": (replicated, {}, 4 * P, 2),
    "checkpointing": (reentrant, {}, 4 * P, 2)}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", DDP)
def test_ddp_reduces_each_gradient_once(case):
    build, settings, reduced, calls = DDP[case]
    run = Run(build, **settings) if settings else shared_run(build)
    assert run.comm("backward", "all_reduce") == reduced and run.calls("all_reduce") == calls
    assert run.comm("forward") == 0
    elements = P + VOCABULARY * HIDDEN * (case == "mixed precision")
    assert run.profile.params == run.profile.whole_params == elements
    assert run.profile.optimizer_bytes == 8 * elements


def test_ddp_holds_buckets_beside_gradients_unless_these_are_views():
    plain, views = shared_run(PLAIN), shared_run(VIEWS)
    assert plain.peak == one().peak + 4 * P
    assert plain.end("backward") == one().end("backward") + 4 * P
    assert views.end("backward") == one().end("backward")
    held = plain.profile.peak_by_category["communication buffer"]
    assert 4 * P <= held < 4 * P + 2**20 and "held by the model" not in plain.profile.peak_by_category


def test_batch_norm_in_ddp():
    images = (torch.rand(4, 3, 32, 32),)
    buffers = 4 * 32 + 8  # a mean and a variance of each channel, a count
    plain = Run(lambda: DistributedDataParallel(Normed().cuda()), args=images)
    assert (plain.comm("forward"), plain.comm("backward")) == (buffers, 4 * 634)
    assert Run(lambda: DistributedDataParallel(Normed().cuda(), broadcast_buffers=False),
               args=images).comm("forward") == 0
    same = Run(lambda: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Normed()).cuda()), args=images)
    # each rank's mean, inverse deviation and count are gathered; two sums of each channel are reduced
    assert same.comm("forward", "all_gather") == 8 * 4 * 33
    assert same.comm("backward") == 4 * 634 + 4 * 32


def test_ranks_join_with_as_many_inputs_as_this_one():
    def step(model, optimizer, x):
        with model.join():
            for _ in range(2):
                model(x).backward()
                optimizer.step()
    run = Run(lambda: DistributedDataParallel(Normed().cuda()), args=(torch.rand(4, 3, 32, 32),), step=step)
    assert run.comm("backward") == 2 * 4 * 634


# ZeRO gives each next largest tensor to the rank that has least: 9 tensors are of 1024 x 256, so rank 0, the first of
# those that have least, gets two of them, and nothing else since others have less.
OWN = 2 * 4 * HIDDEN * HIDDEN


@pytest.mark.parametrize("is_view, broadcasts", [(False, TENSORS), (True, 8)])
def test_zero_keeps_states_of_its_own_parameters_and_sends_these_to_all(is_view, broadcasts):
    run = Run(ddp(), optimizer=lambda p: ZeroRedundancyOptimizer(
        p, torch.optim.AdamW, parameters_as_bucket_view=is_view, lr=1e-4))
    p = run.profile
    assert (p.param_bytes, p.optimizer_bytes) == (4 * P, 8 * OWN)
    assert run.comm("optimizer", "broadcast") == 4 * P and run.calls("broadcast") == broadcasts
    assert run.peak == one().peak + 4 * P - 8 * (P - OWN)
    assert p.peak_by_category["optimizer state"] == 8 * OWN


def test_a_step_says_nothing_of_timers_that_the_simulated_device_lacks(capfd):
    torch.set_warn_always(True)
    try:
        Run(ddp())
    finally:
        torch.set_warn_always(False)
    assert "Time stats" not in capfd.readouterr().err


def test_zero_overlaps_with_ddp():
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    found = []

    def build():
        model = DistributedDataParallel(gpt2())
        found[:] = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-4)]
        model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, found[0]))
        return model

    run = Run(build, optimizer=lambda p: found[0])
    assert run.comm("backward") == 4 * P + 4 * P  # gradients are reduced, parameters sent
    assert run.profile.param_bytes == 4 * P
