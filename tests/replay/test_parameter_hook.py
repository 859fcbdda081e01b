"""Hooks on parameters run on fake tensors, with an optimizer that one steps, and leave what they reach unchanged."""
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.parallel import world
from analyzer.tools.runtime import measure

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw_one_by_one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}
TABLE: dict[torch.Tensor, torch.optim.Optimizer] = {}
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def make_layers(depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth)))


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def by_default_argument(model: nn.Module, make: Make) -> list[torch.optim.Optimizer]:
    found = []
    for parameter in model.parameters():
        optimizer = make([parameter])
        parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: update(optimizer))
        found.append(optimizer)
    return found


def by_global(model: nn.Module, make: Make) -> list[torch.optim.Optimizer]:
    TABLE.clear()
    TABLE.update({parameter: make([parameter]) for parameter in model.parameters()})
    for parameter in TABLE:
        parameter.register_post_accumulate_grad_hook(lambda p: update(TABLE[p]))
    return list(TABLE.values())


class Stepper:
    def __init__(self, parameter: torch.Tensor, make: Make) -> None:
        self.optimizer = make([parameter])
        self.calls = 0

    def step(self, _: torch.Tensor) -> None:
        self.calls += 1
        update(self.optimizer)

    __call__ = step


def by_method(model: nn.Module, make: Make) -> list[torch.optim.Optimizer]:
    steppers = [Stepper(p, make) for p in model.parameters()]
    for i, (parameter, stepper) in enumerate(zip(model.parameters(), steppers)):
        parameter.register_post_accumulate_grad_hook(stepper.step if i % 2 else stepper)
    return [stepper.optimizer for stepper in steppers]


def by_last_gradient(model: nn.Module, make: Make) -> list[torch.optim.Optimizer]:
    """One optimizer of all parameters, stepped when the last gradient is there."""
    optimizer = make(list(model.parameters()))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: update(optimizer))
    return [optimizer]


WAYS = (by_default_argument, by_global, by_method, by_last_gradient)


def assert_like_measured(model: nn.Module, args: tuple[torch.Tensor, ...], **settings: Any) -> None:
    predicted = profile(model, args=args, device="cpu", **settings)
    assert not [a for a in predicted.assumptions if "hook" in a]
    measured = measure(model, args=args)
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
    assert {k: v.peak_allocated_bytes for k, v in predicted.phases.items()} == {
        k: v.peak_allocated_bytes for k, v in measured.phases.items()}


@pytest.mark.parametrize(("register", "name"), list(zip(WAYS, itertools.cycle(OPTIMIZERS))))
def test_an_optimizer_stepped_in_backward_is_as_measured(register: Any, name: str) -> None:
    model = make_layers()
    optimizers = register(model, OPTIMIZERS[name])
    assert_like_measured(model, (torch.rand(4, 64), ))
    assert_like_measured(model, (torch.rand(4, 64), ))  # measured steps made states
    assert all(p is q for p, q in zip(model.parameters(), [
        q for o in optimizers for group in o.param_groups for q in group["params"]]))


def test_a_hook_that_makes_another_gradient_is_as_measured() -> None:
    model = make_layers()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5 + 1)
    assert_like_measured(model, (torch.rand(4, 64), ))


@pytest.mark.parametrize(("register", "fails"), list(zip(WAYS, itertools.cycle((False, True)))))
def test_leaves_optimizers_and_hooks_as_they_were(register: Any, fails: bool) -> None:
    model, x = make_layers(), torch.rand(4, 64)
    optimizers = register(model, OPTIMIZERS["adam"])
    model(x).sum().backward()
    calls = []

    def count(_: torch.Tensor) -> None:
        calls.append(1)
        if fails and len(calls) == 2:
            raise ValueError("of the hook")

    last = next(model.parameters())
    last.register_post_accumulate_grad_hook(count)
    hooks = dict(last._post_accumulate_grad_hooks)
    before = copy.deepcopy([o.state_dict() for o in optimizers])
    weights = [p.detach().clone() for p in model.parameters()]
    keys = [list(o.state) for o in optimizers]
    if fails:
        with pytest.raises(ValueError, match="of the hook"):
            profile(model, args=(x, ), device="cpu")
    else:
        profile(model, args=(x, ), device="cpu")
    assert not calls and last._post_accumulate_grad_hooks == hooks
    assert all(a is b for old, o in zip(keys, optimizers) for a, b in zip(old, o.state, strict=True))
    torch.testing.assert_close([o.state_dict() for o in optimizers], before, rtol=0, atol=0)
    torch.testing.assert_close([p.detach() for p in model.parameters()], weights, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    assert len(calls) == 1 and all(not torch.equal(p, w) for p, w in zip(model.parameters(), weights))


def test_a_graph_runs_hooks_of_its_parameters() -> None:
    model, x = make_layers(), torch.rand(4, 64)
    graph = symbolic_trace(model, meta_args={"input": x})  # which has the model's parameters
    without = profile(model, args=(x, ), device="cpu")
    by_default_argument(graph, OPTIMIZERS["sgd"])
    found = symbolic_profile(graph, x, device="cpu").meta["profile"]
    eager = profile(model, args=(x, ), device="cpu", reuse=False)
    assert found.phases["backward"].peak_allocated_bytes == eager.phases["backward"].peak_allocated_bytes
    assert found.peak_allocated_bytes < without.peak_allocated_bytes
    assert all(p.grad is None for p in graph.parameters())


class Reference:
    def __init__(self, to: Any) -> None:
        self.to = to


def test_an_optimizer_that_is_out_of_reach_is_told_of() -> None:
    model = make_layers()
    hidden = [[[Reference(Reference(Reference(torch.optim.SGD([p], lr=0.1))))]] for p in model.parameters()]
    for parameter, way in zip(model.parameters(), hidden):
        parameter.register_post_accumulate_grad_hook(lambda p, way=way: update(way[0][0].to.to.to))
    found = profile(model, args=(torch.rand(4, 64), ), device="cpu").assumptions
    assert [a for a in found if "does not have the parameters of the profiled model" in a]


def test_an_optimizer_of_sharded_parameters_is_within_reach() -> None:
    def build() -> nn.Module:
        model = fully_shard(make_layers(2).cuda())
        by_default_argument(model, OPTIMIZERS["momentum"])
        return model

    with world(8):
        p = profile(build, (torch.rand(4, 64),), device="h100", step=lambda m, _, x: m(x).sum().backward())
    assert p.optimizer_bytes == p.param_bytes == 2 * 64 * 64 * 4 // 8
    assert not [a for a in p.assumptions if "does not have the parameters of the profiled model" in a]


def test_hooks_on_autograd_nodes_are_told_of() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = make_layers()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    found = profile(model, args=(torch.rand(4, 64), ), device="cpu").assumptions
    assert [a for a in found if a.startswith("hooks on the autograd nodes of parameters are not run")]
