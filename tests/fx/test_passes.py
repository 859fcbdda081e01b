"""Passes over traced graphs: what they change, what they leave, and that results stay."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.symbolic_profile import reprofile
from analyzer.errors import InputError
from analyzer.fx import CheckpointRegion, nodes_in, set_region

X = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)


class Net(nn.Module):
    """Layers with and without bias, functional forms, autocast, and results that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.up = nn.Conv2d(4, 6, 3, padding=1), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.plain, self.fc, self.drop = nn.Linear(16, 16, bias=False), nn.Linear(16, 8), nn.Dropout(0.5)
        self.weight, self.bias = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(F.relu(self.conv(x))))
        y.exp().sum()
        self.norm(y)
        self.drop(y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(self.plain(y)).tanh()
        y = F.linear(y.float(), self.weight, self.bias).flatten(0, 2)
        return torch.addmm(self.bias, y, self.weight).addmm(y, self.weight, alpha=2)


def step(module: nn.Module) -> dict[str, Any]:
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    module.zero_grad()
    torch.manual_seed(0)
    output = module(X)
    output.square().sum().backward()
    found = {"output": output.detach(), **{n: p.grad.clone() for n, p in module.named_parameters()},
             "random": torch.rand(1), **{n: b.clone() for n, b in module.named_buffers()}}
    for name, b in module.named_buffers():
        b.copy_(buffers[name])
    return found


def assert_same(module: nn.Module, expected: dict[str, Any], **tolerance: float) -> None:
    found = step(module)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=(name + ": {}").format, **tolerance)


def names(gm: Any) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op.startswith("call")]


def test_dead_code_is_what_has_no_effect() -> None:
    model = Net()
    gm = symbolic_trace(model, meta_args={"x": X})
    expected = step(gm)
    region = set_region(gm, ["exp", "sum_1", "norm_1"], CheckpointRegion(0, preserve_rng_state=False))
    dead = {"exp", "sum_1"}
    before = names(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert names(gm) == [n for n in before
                         if n not in dead], "the second normalisation updates its buffers, dropout draws random numbers"
    assert [n.name for n in nodes_in(gm, region)] == ["norm_1"]
    gm = symbolic_trace(model, meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert_same(gm, expected, rtol=0, atol=0)
    gm = symbolic_trace(model.eval(), meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert not {"exp", "sum_1", "norm_1"} & set(names(gm))
    model.train()


def test_what_draws_random_numbers_is_not_dead() -> None:
    def f(x: Tensor) -> Tensor:
        torch.poisson(x)
        torch._standard_gamma(x + 1)
        return x + torch.rand(x.shape)

    x = torch.rand(2, 3)
    gm = symbolic_trace(f, meta_args={"x": x})
    torch.manual_seed(0)
    expected = gm(x)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    torch.manual_seed(0)
    assert torch.equal(gm(x), expected)


def test_an_edited_graph_is_annotated_again_with_the_arguments_of_last_time() -> None:
    gm = symbolic_profile(symbolic_trace(Net(), meta_args={"x": X}), X, device="h100")
    before, copied = gm.meta["profile"], copy.deepcopy(gm)
    set_region(gm, ["conv", "relu"])
    after = reprofile(gm).meta["profile"]
    assert gm.code.count("checkpoint.checkpoint(") == 1 and after.recompute_flops > 0 == before.recompute_flops
    assert after.to_json() == symbolic_profile(copy.deepcopy(gm), X, device="h100").meta["profile"].to_json()
    with pytest.raises(InputError, match=r"this graph module has not been profiled; call symbolic_profile\(gm, ...\)"):
        reprofile(copied)
