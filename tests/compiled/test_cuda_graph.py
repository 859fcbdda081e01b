"""CUDA graphs of compiled functions: what is captured, and the pool that they share."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from analyzer import Profile, profile


class Net(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes, self.layers = writes, nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            x.add_(1)
        out: torch.Tensor = self.layers(x)
        return out


def are_captured(p: Profile) -> list[bool]:
    assert p.compiled is not None
    return [info.cuda_graphs for info in p.compiled]


def profile_net(model: Any, **options: Any) -> Profile:
    return profile(model, (torch.rand(512, 256),), device="h100", optimizer="sgd", **options)


def test_each_half_is_launched_as_one_and_says_so() -> None:
    p = profile_net(torch.compile(Net(), mode="reduce-overhead"))
    assert are_captured(p) == [True]
    plain = profile_net(torch.compile(Net()))
    assert are_captured(plain) == [False]
    assert p.kernel_seconds == pytest.approx(plain.kernel_seconds, rel=0.1)


def test_the_pool_is_reserved_beside_what_is_cached() -> None:
    plain, captured = profile_net(torch.compile(Net())), profile_net(torch.compile(Net(), mode="reduce-overhead"))
    assert captured.peak_reserved_bytes is not None and plain.peak_reserved_bytes is not None
    assert captured.peak_reserved_bytes >= plain.peak_reserved_bytes
    # an input of the graph is copied into the pool
    copied = 512 * 256 * 4
    after = [p.phases["forward"].allocated_bytes for p in (captured, plain)]
    assert after[0] is not None and after[1] is not None and after[0] - after[1] == copied
    assert any("pool" in line for line in captured.assumptions) and not plain.assumptions


def test_options_name_it_too_and_the_backend_of_that_name_captures() -> None:
    for wrapped in (torch.compile(Net(), options={"triton.cudagraphs": True}),
                    torch.compile(Net(), backend="cudagraphs")):
        p = profile_net(wrapped)
        assert are_captured(p) == [True]


def test_a_graph_that_writes_to_what_it_is_given_runs_kernel_by_kernel() -> None:
    p = profile_net(torch.compile(Net(writes=True), mode="reduce-overhead"), mode="infer")
    assert are_captured(p) == [False]
    assert any("it writes to 1 of the tensors" in line for line in p.assumptions)


def test_devices_without_cuda_have_none() -> None:
    p = profile(torch.compile(Net(), mode="reduce-overhead"), (torch.rand(4, 256),), device="xeon_8480", mode="infer")
    assert are_captured(p) == [False]
