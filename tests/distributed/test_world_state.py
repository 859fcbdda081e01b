"""After a world everything is as it was: groups, hooks, environment, torch's functions and classes, random numbers."""
import os
import random
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.parallel.distributed as ddp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.optim import zero_redundancy_optimizer
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel

from analyzer import profile
from analyzer.errors import InputError
from analyzer.parallel import world
from tests.meta.test_mode import assert_unchanged, observable_torch

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.rand(4, 16)
MODULES = [dist, c10d, ddp, ddp.DistributedDataParallel, c10d.Work, DTensor, dist.device_mesh, torch.autograd,
           zero_redundancy_optimizer, _fsdp_collectives, OffsetBasedRNGTracker, PipelineStage, ShardingPropagator]


def observe():
    """What of torch.distributed, the process and the generators a world could change."""
    return {**{(m.__name__, k): v for m in MODULES for k, v in list(vars(m).items())
               if callable(v) or isinstance(v, (property, staticmethod))},
            "environment": dict(os.environ), "hook": sys.excepthook, "initialized": dist.is_initialized(),
            "groups": dict(c10d._world.pg_map), "names": dict(c10d._world.pg_names), "count": c10d._world.group_count,
            "default": c10d._world.default_pg, "random": random.getstate(),
            "torch random": torch.get_rng_state().tolist(), "default device": torch.get_default_device()}


def changed(before):
    after = observe()
    return [k for k in before.keys() | after.keys()
            if before.get(k) is not after.get(k) and before.get(k) != after.get(k)]


def net():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def wrap_ddp():
    return DistributedDataParallel(net().cuda())


def wrap_fsdp1():
    return FullyShardedDataParallel(net(), device_id=0)


def wrap_fsdp2():
    return fully_shard(net().cuda())


@pytest.fixture
def fresh():
    """Whatever is imported or cached at a first use is by then."""
    for build in (wrap_ddp, wrap_fsdp1, wrap_fsdp2):
        with world(4):
            profile(build, args=(X,), optimizer="adamw")


@pytest.mark.parametrize("build", [wrap_ddp, wrap_fsdp1, wrap_fsdp2])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_a_world(fresh, build, error):
    before, of_torch = observe(), observable_torch()

    def loss_fn(output):
        if error is not None:
            raise error
        return output.sum()

    try:
        with world(8, rank=3):
            assert dist.get_world_size() == 8 and os.environ["RANK"] == "3"
            profile(build, args=(X,), optimizer="adamw", loss_fn=loss_fn)
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error
    else:
        assert error is None
    assert changed(before) == []
    assert_unchanged(of_torch)


def test_a_process_group_of_the_user_survives():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine, before = dist.new_group([0]), observe()
        with world(8):
            assert dist.get_world_size() == 8 and dist.get_backend() == "nccl"
            profile(wrap_ddp, args=(X,), optimizer="sgd")
        assert changed(before) == []
        for group in (None, mine):
            total = torch.ones(2)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [1, 1] and dist.get_backend(group) == "gloo"
        model = DistributedDataParallel(nn.Linear(2, 2, bias=False))
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1, 1], [1, 1]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend, expected", [
    ("nccl", "nccl"), ("cpu:gloo,cuda:nccl", "nccl"), ("cuda:nccl,cpu:gloo", "nccl"), ("gloo", "gloo")])
def test_the_backend_of_a_group_is_what_was_asked_for_cuda(backend, expected):
    with world(8):
        assert dist.get_backend(dist.new_group([0, 1], backend=backend)) == expected


def test_a_group_takes_options_and_a_timeout_as_with_nccl():
    with world(4):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # Megatron-LM, parallel_state.py
        options.config.max_ctas = 8
        assert dist.get_world_size(dist.new_group([0, 1], pg_options=options)) == 2
        c10d._set_pg_timeout(timedelta(seconds=3), dist.new_group([0, 1]))  # torchtitan, after its first step
        c10d._set_pg_timeout(timedelta(seconds=3))


def test_there_is_one_world_at_a_time():
    message = (r"world\(size=4, rank=0\) inside a world of 8 ranks: torch.distributed knows one world per process; "
               "leave that one first")
    with world(8), pytest.raises(InputError, match=message), world(4):
        pass
    with world(4):
        assert dist.get_world_size() == 4


def in_thread(function):
    found = []

    def call():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def test_a_second_thread_is_told_of_the_first_ones_world():
    def enter():
        with world(4):
            pass
    with world(8):
        error = in_thread(enter)
    assert isinstance(error, InputError) and "inside a world of 8 ranks of another thread" in str(error)


def test_another_thread_profiles_plain_models_meanwhile():
    plain = profile(net, args=(X,), optimizer="adamw")
    with world(8):
        first = profile(wrap_ddp, args=(X,), optimizer="adamw")
        other = in_thread(lambda: profile(net, args=(X,), optimizer="adamw"))
        again = profile(wrap_ddp, args=(X,), optimizer="adamw")
    assert other.peak_allocated_bytes == plain.peak_allocated_bytes and other.world is None
    assert other.phases["backward"].comm_bytes == 0 and other == plain
    assert first.phases["backward"].comm_bytes == again.phases["backward"].comm_bytes == 4 * 2 * (16 * 16 + 16)


@pytest.mark.parametrize("build", [wrap_ddp, wrap_fsdp2])
def test_a_model_built_in_the_world_is_run_as_it_is(build):
    with world(8):
        model = build()
        found = [profile(model, args=(X,), optimizer="sgd").param_bytes for _ in range(2)]
        assert all(parameter.grad is None for parameter in model.parameters())
    elements = 2 * (16 * 16 + 16)
    assert found == [4 * elements // (1 if build is wrap_ddp else 8)] * 2
