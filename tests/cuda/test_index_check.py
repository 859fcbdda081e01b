"""Indices that are known to point outside."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import profile


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)

    def forward(self, x):
        return self.embedding(torch.arange(x.shape[1], device=x.device)) + x


class Pick(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, torch.tensor([0, 5]))


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_more_positions_than_the_table_has_raise_as_torch_does(device):
    x = torch.ones(2, 9, 8)
    with pytest.raises(IndexError, match="index out of range in self"):
        Positions()(x)
    with pytest.raises(IndexError, match="index out of range in self"):
        profile(Positions(), args=(x,), device=device)
    assert profile(Positions(), args=(x[:, :4],), device=device).fwd_flops


@pytest.mark.parametrize("function", [lambda x, i: x.index_select(0, i), lambda x, i: x.gather(0, i)])
def test_selecting_outside_raises_what_the_processor_raises(function):
    x = torch.rand(5)
    with pytest.raises((IndexError, RuntimeError)) as real:
        Pick(function)(x)
    with pytest.raises(type(real.value), match=str(real.value)):
        profile(Pick(function), args=(x,), device="cpu")
