"""`profile` in a world keeps what it promises outside of one."""
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from analyzer import Profile, profile
from analyzer.errors import InputError
from analyzer.parallel import world
from analyzer.units import format_seconds
from tests.small_model import Calls

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.rand(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


def replica():
    return nn.parallel.DistributedDataParallel(Net().cuda())


def test_eval_profiles_the_model_in_evaluation():
    with world(2):
        rows = [profile(replica, args=(X,), mode="infer", eval=flag) for flag in (False, True)]
    assert [p.modules.training for p in rows] == [True, False]
    assert rows[0].fwd_flops - rows[1].fwd_flops == 2 * 4 * 8  # dropout draws and scales


def test_a_model_of_the_world_has_its_flags_and_no_gradients_afterwards():
    with world(2):
        model = replica()
        profile(model, args=(X,), mode="train", eval=True, optimizer="sgd")
        assert model.training and model.module.dropout.training
        assert all(parameter.grad is None for parameter in model.parameters())
        kept = model.module.linear.weight.grad = torch.zeros(8, 8, device="cuda")
        profile(model, args=(X,), optimizer="sgd")
        assert model.module.linear.weight.grad is kept


def sharded():
    return fully_shard(Net().cuda())


def split():
    return parallelize_module(Net().cuda(), init_device_mesh("cuda", (2,)), {"linear": ColwiseParallel()})


def test_world_may_be_given():
    given = profile(replica, args=(X,), optimizer="sgd", world=world(4, rank=3))
    with world(4, rank=3):
        entered = profile(replica, args=(X,), optimizer="sgd")
    assert given == entered and given.world.rank == 3 and not torch.distributed.is_initialized()


def fully_sharded():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    stack = Calls(lambda m, x: m.blocks(x), blocks=nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))))
    return FullyShardedDataParallel(stack.cuda(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0)


def test_reports_show_the_wrappers_levels_and_the_ranks_share():
    with world(8):
        p = profile(fully_sharded, args=(torch.rand(4, 64),), optimizer="sgd", device="h100")
    text = p.report("deepspeed")
    figures = dict(re.findall(r"^(params [a-zA-Z ]+):\s+(\S+)", text, re.M))
    # three layers of 64 x 64, of which each of eight ranks holds an eighth
    assert figures == {"params per GPU": "1.54", "params of model": "12.29"}
    levels = [module.path for module in p.modules.walk() if module.type == "FullyShardedDataParallel"]
    assert levels == ["", *(f"_fsdp_wrapped_module.blocks.{i}" for i in range(3))]
    rows = [module for module in p.modules.walk() if module.type == "Linear"]
    assert [(row.params, row.fwd_macs) for row in rows] == [(512, 4 * 64 * 64)] * 3
    assert sum(row.fwd_seconds for row in rows) <= p.modules.fwd_seconds


def test_a_message_of_any_rank_comes_from_another_one():
    with world(4):
        assert torch.distributed.recv(torch.zeros(4, device="cuda")) == 1
    with world(4, rank=2):
        assert torch.distributed.recv(torch.zeros(4, device="cuda")) == 0


def test_a_model_that_was_built_elsewhere_is_refused_and_untouched():
    model = Net()
    model.linear.weight.grad = torch.ones(8, 8)
    with world(2), pytest.raises(InputError) as error:
        profile(model, args=(X,), optimizer="sgd")
    assert str(error.value) == (
        "the model (Net) was not built in world(size=2, rank=0): give `profile` the function that builds and wraps it, "
        "or profile the model outside of the world")
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8))


@pytest.mark.parametrize("model, told", [
    (123, "model=123: must be a torch.nn.Module or a callable of no arguments that builds one"),
    (torch.nn.GELU().forward, "is the forward of GELU; pass the module, as it is or under one torch.compile"),
    (torch.compile(torch.compile(torch.nn.GELU())), "is the forward of GELU; pass the module, as it is or under one"),
    (lambda: "no model", "returned str, not a torch.nn.Module")])
def test_what_builds_no_model_is_refused_as_outside_a_world(model, told):
    with world(2), pytest.raises(InputError) as inside:
        profile(model, args=(torch.empty(2, 8),))
    with pytest.raises(InputError) as outside:
        profile(model, args=(torch.empty(2, 8),))
    assert told in str(inside.value) and str(inside.value) == str(outside.value)


@pytest.mark.parametrize(("size", "cluster", "is_told"), [
    (16, None, True), (8, None, False), (16, "dgx_h100", False), (16, "h100,fabric=50e9", False),
    (16, "h100,devices_per_host=4", True)])
def test_a_network_that_was_not_given_is_told_and_widens_the_range(size: int, cluster: str | None,
                                                                   is_told: bool) -> None:
    def build() -> nn.Module:
        return nn.parallel.DistributedDataParallel(nn.Linear(8192, 8192, bias=False).cuda())

    def run(cluster: str | None) -> Profile:
        with world(size, cluster=cluster):
            return profile(build, (torch.rand(64, 8192, device="cuda"), ), optimizer="sgd", device="h100")

    p = run(cluster)
    said = [line for line in p.assumptions if line.startswith("not given: ")]
    assert bool(said) == is_told and ("not given: " in p.report("brief")) == is_told
    if is_told and cluster is None:
        half = run("h100,fabric=25e9")
        assert said == [
            "not given: the network between hosts; 50.00 GB/s of a device is assumed: 400 Gb/s, as in DGX H100; a "
            f"step takes {format_seconds(p.step_seconds)} with it and {format_seconds(half.step_seconds)} with half of "
            "it; give yours: --cluster h100_sxm,fabric=50e9, world(cluster='h100_sxm,fabric=50e9')"]
        same = run("h100,fabric=50e9")
        assert same.step_seconds == p.step_seconds and same.step_seconds_range and p.step_seconds_range
        assert p.step_seconds_range[1] > max(same.step_seconds_range[1], half.step_seconds or 0)
