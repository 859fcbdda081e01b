"""flops-profiler's documented way to profile one step of a training loop. Only the import is another one than in a
script for it:

    from flops_profiler.profiler import FlopsProfiler

Where `stop_profile` and `print_model_profile` come after the optimizer's step, the profile also tells the latency of
the backward pass and of the optimizer, by module.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from analyzer.tools.runtime import FlopsProfiler


def make_batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for _ in range(count)]


class Model(nn.Module):
    """Returns its loss, as the documented script takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4))
        self.head = nn.Linear(16 * 8 * 8, 10)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self.features(images).flatten(1)), labels)


def train(profile_step: int = 2, print_profile: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prof = FlopsProfiler(model)
    found: dict[str, Any] = {}

    for step, batch in enumerate(make_batches(4)):
        if step == profile_step:
            prof.start_profile()

        loss = model(batch)

        if step == profile_step:
            prof.stop_profile()
            found = {"flops": prof.get_total_flops(), "macs": prof.get_total_macs(), "params": prof.get_total_params()}
            if print_profile:
                prof.print_model_profile(profile_step=profile_step)
            prof.end_profile()

        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    print(train())
