"""Operators whose result depends on data are logged as themselves, with their own count."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.tools.runtime import measure


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)



@pytest.mark.parametrize(("function", "args", "flops"), [
    (torch.unique, (torch.rand(1000),), 10_000),  # 1000 ⌈log₂ 1000⌉ comparisons
    (torch.unique, (torch.ones(1000, device="meta"),), 10_000),
    (lambda x: torch.unique(x, dim=0), (torch.rand(100, 3),), 100 * 3 * 7),
    (torch.masked_select, (torch.rand(100), torch.rand(100) > 0.5), 0),
    (lambda x: x[x > 0.5], (torch.rand(100),), 0),
    (lambda a, b: torch.linalg.lstsq(a, b)[0], (torch.rand(6, 4), torch.rand(6, 2)), 310),
], ids=["unique", "unique of unknown data", "unique rows", "masked_select", "mask", "lstsq"])
def test_an_operator_of_unknown_size_counts_by_its_own_formula(function, args, flops):
    predicted = profile(Apply(function), args=args, mode="infer", device="cpu")
    assert (predicted.fwd_flops, predicted.uncounted) == (flops, ())
    if not args[0].is_meta:
        assert measure(Apply(function), args=args, mode="infer", steps=1).fwd_flops == flops
