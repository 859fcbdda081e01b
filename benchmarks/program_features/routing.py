"""Features whose work depends on data: experts, conditions, sizes."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class TopTwo(Feature):
    """Weighs its result by the two largest of four gates."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        weights, _ = self.gate(x).softmax(-1).topk(2, -1)
        return self.linear(x) * weights.sum(-1, keepdim=True)


class Experts(Feature):
    """Sends rows to experts by their gates."""

    def build(self, place: Place) -> None:
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            own = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, own, expert(rows[own]) * weights[own][:, None])
        return out.view(x.shape)


class DenseExperts(Experts):
    """Runs all experts and weighs their results."""

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None].mean((0, 1))[:, 0]


class MeanBranch(Feature):
    """Goes another way where its mean is positive."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x * 2 if x.mean() > 0 else x


class KnownItem(Feature):
    """Multiplies by a number that it asks for, which follows from the shape."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * torch.arange(x.shape[1], device=x.device).sum().item()


class NotFinite(Feature):
    """Mends what is not a number."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return torch.nan_to_num(x) if torch.isnan(x).any() else x


class MaskedRows(Feature):
    """Computes with the rows that a mask of data chooses."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        chosen = rows[rows.sum(-1) > 0]
        return self.linear(x) + self.linear(chosen).mean()


class KnownMask(Feature):
    """Computes with the rows that a mask of positions chooses."""

    def forward(self, x: Tensor) -> Any:
        keep = torch.arange(x.shape[1], device=x.device) < 2
        return self.linear(x) + self.linear(x[:, keep]).mean(1, keepdim=True)


class ShapeBranch(Feature):
    """Goes another way by its input's shape."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x.shape[1] > 4 and x.dtype is torch.float32 else self.linear(x)


class Sorted(Feature):
    """Sorts along the length."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).sort(1).values


class Unique(Feature):
    """Adds how many values differ."""

    def forward(self, x: Tensor) -> Any:
        count = torch.unique(x.detach().round()).shape[0]
        return self.linear(x) * float(count > 0)


class WhileLoop(Feature):
    """Loops until its norm is small, twice at most."""

    def forward(self, x: Tensor) -> Any:
        x, turns = self.linear(x), 0
        while turns < 2 and x.norm() > 1:
            x, turns = x / 2, turns + 1
        return x


class PaddedLengths(Feature):
    """Masks by lengths made on the way."""

    def forward(self, x: Tensor) -> Any:
        lengths = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        return self.linear(x) * mask[..., None]


class MaximumLength(Feature):
    """Cuts to a length that it asks known lengths for."""

    def forward(self, x: Tensor) -> Any:
        lengths = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
        longest = int(lengths.max())
        return torch.cat([self.linear(x[:, :longest]), x[:, longest:]], 1)
