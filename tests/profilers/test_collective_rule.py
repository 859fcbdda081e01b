"""Collectives take the time of their kind, bytes and ranks on the device's cluster."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from analyzer import profile
from analyzer.hardware import cluster_of, find_device
from analyzer.hardware.kernel_time.collective import collective_time


class Reduced(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, "sum", dist.group.WORLD)


class Gathered(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4 * len(x), x.shape[1], device=x.device)
        dist.all_gather_into_tensor(out, x)
        return out


@pytest.mark.parametrize(("model", "kind", "nbytes"), [
    (Reduced(), "all_reduce", 1024 * 1024 * 4), (Gathered(), "all_gather", 4 * 1024 * 1024 * 4)])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_its_seconds_are_those_of_the_model(group, model: torch.nn.Module, kind: str, nbytes: int, device: str) -> None:
    p = profile(model, args=(torch.empty(1024, 1024),), mode="infer", device=device)
    expected = collective_time(kind, nbytes, 4, cluster_of(find_device(device)), dtype="float32")
    assert expected is not None
    phase = p.phases["forward"]
    assert phase.communication_seconds + phase.latency_seconds == pytest.approx(expected.seconds, rel=1e-6)


class Waiting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return x + 1


def test_a_barrier_takes_time(group) -> None:
    x = torch.empty(8, 8)
    waiting = profile(Waiting(), args=(x,), mode="infer", device="h100").kernel_seconds
    alone = profile(torch.nn.Identity(), args=(x,), mode="infer", device="h100").kernel_seconds
    assert alone == 0 and waiting > 2e-6
