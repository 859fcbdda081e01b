"""Hooks on parameters, which run when a gradient is there, are never left out without a word."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from analyzer import profile


def make_layers(width: int = 64, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("register", [
    lambda p: p.register_post_accumulate_grad_hook(drop_gradient), lambda p: p.register_hook(torch.neg)])
def test_says_that_hooks_on_parameters_are_not_run(reuse: bool, register: Callable[[torch.Tensor], object]) -> None:
    model = make_layers()
    args = (torch.rand(4, 64), )
    assert not [a for a in profile(model, args=args, device="cpu", reuse=reuse).assumptions if "hooks" in a]
    for parameter in model.parameters():
        register(parameter)
    found = profile(model, args=args, device="cpu", reuse=reuse).assumptions
    assert len([a for a in found if a.startswith("hooks on parameters are not run")]) == 1
