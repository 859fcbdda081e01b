"""Losses that are summed into the storage of their elements."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import profile
from analyzer.tools.runtime import measure


class Loss(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(16, 8))

    def forward(self, target):
        return self.function(self.weight, target)


@pytest.mark.parametrize("function", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy,
                                      F.l1_loss, F.huber_loss])
def test_a_loss_holds_what_the_processor_holds(function):
    target = torch.rand(16, 8)
    predicted = profile(Loss(function), args=(target,), device="cpu", reuse=False)
    measured = measure(Loss(function), args=(target,), steps=1)
    for phase in ("forward", "backward"):
        assert predicted.phases[phase].allocated_bytes == measured.phases[phase].allocated_bytes
    assert predicted.phases["forward"].peak_allocated_bytes == measured.phases["forward"].peak_allocated_bytes


@pytest.mark.parametrize(("function", "elements"), [(F.mse_loss, 128), (F.smooth_l1_loss, 128), (F.l1_loss, 1)])
def test_it_is_the_same_on_a_gpu(mode, function, elements):
    loss = function(*torch.rand(2, 16, 8, device="cuda"))
    assert (loss.shape, loss.untyped_storage().nbytes()) == ((), 4 * elements)
