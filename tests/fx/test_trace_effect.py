"""What a forward does besides computing its result: the graph does it too, or says or refuses what it does not."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import symbolic_trace

X = torch.ones(2, 6)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(6))
        self.register_buffer("v", torch.zeros(6))
        self.inner = nn.BatchNorm1d(6)


class Exchanged(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.u, self.v = self.v + x.mean(0), self.u
        return x * self.u + self.v


class Rotated(Buffers):
    """Three frames are kept; the oldest one is never read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.inner.running_mean, self.u, self.v = self.u, self.v, x[0].detach()
        return y


class OldReturned(Buffers):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        old = self.u
        self.u = x.mean(0)
        return self.v, [old]


class OldChanged(Buffers):
    """What was the buffer is written to after another took its place."""

    def forward(self, x: Tensor) -> Tensor:
        old, self.u = self.u, self.u * 2
        old.add_(self.v)
        self.v = old
        return x + self.u + old


@pytest.mark.parametrize("kind", [Exchanged, Rotated, OldReturned, OldChanged])
def test_old_values_of_replaced_buffers_are_read_before_new_ones_are_written(kind: Any) -> None:
    model = kind()
    gm = symbolic_trace(traced := copy.deepcopy(model), meta_args={"x": X})
    for i in range(4):
        x = torch.arange(12.).reshape(2, 6) + i
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(dict(traced.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)
    assert not gm.meta["assumptions"]


class TiedBuffer(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.v = self.u

    def forward(self, x: Tensor) -> Tensor:
        self.v = x.mean(0)
        return x


class Parameters(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.weight, self.inner.bias = self.inner.bias, self.inner.weight
        return y


class Modules(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner, self.other = self.other, self.inner  # type: ignore[assignment]
        return y


class Attributes(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.ones(6), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.first
        self.first, self.second = self.second, self.first
        return y


class Emptied(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.u = None
        return y


@pytest.mark.parametrize("kind, names", [
    (TiedBuffer, ["v"]), (Parameters, ["inner.weight", "inner.bias"]), (Modules, ["inner", "other"]),
    (Attributes, ["first", "second"]), (Emptied, ["u"])])
def test_other_assignments_are_not_in_the_graph_and_told(kind: Any, names: list[str]) -> None:
    gm = symbolic_trace(kind(), meta_args={"x": X})
    told = [text for text in gm.meta["assumptions"] if "the graph does not set it" in text]
    assert {text.split()[2] for text in told} == set(names)
