"""What C++ code makes with another tensor's options is where that tensor is, though both really are on meta."""
from __future__ import annotations

import pytest
import torch

from analyzer import MetaTensorMode, profile


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first + second


class OneOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return Two.apply(self.linear(x))[0]


def test_zeros_for_an_output_without_a_gradient_are_where_it_is():
    # gradients of both outputs live while their sum is made: the first is a view of one number
    p = profile(OneOfTwo(), args=(torch.rand(4096, 64),), reuse=False, device="a100")
    assert p.phases["backward"].peak_allocated_bytes >= p.phases["forward"].allocated_bytes + 2 * 4096 * 64 * 4


@pytest.mark.parametrize("call", [
    lambda x: torch.cov(x), lambda x: torch.vander(x[0]), lambda x: torch.combinations(x[0]),
    lambda x: torch.nn.utils.rnn.pad_sequence([x, x[:2]])], ids=["cov", "vander", "combinations", "pad_sequence"])
def test_what_composites_make_is_where_their_arguments_are(call):
    with MetaTensorMode() as mode:
        x = torch.rand(4, 8, device="cuda")
        host = mode.space.host.peak_allocated_bytes
        assert call(x).device.type == "cuda"
        assert mode.space.host.peak_allocated_bytes == host


def test_the_same_call_for_tensors_elsewhere_is_elsewhere():
    for device in ("cuda", "cpu", "cuda"):
        with MetaTensorMode():
            x = torch.rand(3, device=device)
            assert torch.combinations(x).device.type == device
