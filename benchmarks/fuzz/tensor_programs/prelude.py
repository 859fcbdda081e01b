"""What random programs use: modules, autograd functions and containers of their own."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):  # an adapter around a layer that does not train
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.ones(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Any:  # the layer, and what the adapter adds
        return self.base(x) + x @ self.down.T @ self.up.T


class Gate(nn.Module):  # a gated layer with a buffer that moves
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * width)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Any:  # the gated projection less a moving average
        value, gate = self.proj(x).chunk(2, -1)
        y = value * F.silu(gate)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.detach().float().flatten(0, -2).mean(0), alpha=0.1)
        return y - self.average


class Routed(nn.Module):  # experts weighted by a router, all of them run
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # the experts' outputs, weighted
        weight = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out = out + weight[..., index:index + 1] * expert(x)
        return out


class Double(torch.autograd.Function):  # a function that saves nothing
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # twice ``x``
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # twice the gradient
        return g * 2


class SavesBoth(torch.autograd.Function):  # a function that saves two inputs and a result
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # a product through exp
        out = (x * y).exp()
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # by what was saved
        x, y, out = ctx.saved_tensors
        return (g * out * y).sum_to_size(x.shape), (g * out * x).sum_to_size(y.shape)


class KeepsOnContext(torch.autograd.Function):  # a function that keeps a tensor past ``save_for_backward``
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # a sine whose cosine is kept
        ctx.cosine = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # by what was kept
        return g * ctx.cosine


class TwoResults(torch.autograd.Function):  # a function of two results, one without a gradient
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # ``x`` halved, and its sign
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x / 2, sign

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:  # half the gradient
        return g / 2


class WritesInPlace(torch.autograd.Function):  # a function that writes to its input
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # ``x`` itself, tripled
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # three times the gradient
        return g * 3


@dataclass
class Pair:  # two values in a record
    left: Any
    right: Any


def put(box: dict[str, Any], x: Tensor) -> Tensor:  # put a tensor into a dictionary that was given
    box["put"] = twice = x * 2
    return x + twice
