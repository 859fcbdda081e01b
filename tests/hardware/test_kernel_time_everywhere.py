"""Each device of the catalogue has a time, or says that it is not known; none is 0."""
from __future__ import annotations

import pytest
import torch

from analyzer import profile
from analyzer.hardware import register_device


@pytest.mark.parametrize("name", [spec.name for spec in register_device if spec.name != "cpu"])
def test_a_step_has_a_time_within_its_range(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
                                torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10))
    p = profile(model, args=(torch.empty(64, 3, 32, 32),), optimizer="adamw", device=name)
    assert p.step_seconds is not None and p.kernel_seconds is not None and p.step_seconds_range is not None
    low, high = p.step_seconds_range
    assert 0 < low < p.step_seconds < high and 0 < p.kernel_seconds
    vendor = next(spec.vendor for spec in register_device if spec.name == name)
    told = [line for line in p.assumptions if "those of CUDA" in line]
    assert len(told) == (vendor not in ("NVIDIA", "Intel"))


def test_a_faster_device_of_a_generation_is_not_slower() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(4)])
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    seconds = {name: profile(model, args=(x,), mode="infer", device=name).kernel_seconds
               for name in ("t4", "v100_sxm2_32gb", "a100_80gb", "h100_sxm", "b200")}
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
