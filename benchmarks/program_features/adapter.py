"""Features that change how a layer computes: adapters, parametrizations, pruning, quantized weights, functional ops."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from .feature import WIDTH, Feature, Place


class LowRank(Feature):
    """Adds a low-rank adapter to a frozen layer."""

    def build(self, place: Place) -> None:
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * 0.5


class LowRankByIndex(Feature):
    """Adds a low-rank adapter in odd blocks."""

    def build(self, place: Place) -> None:
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter: nn.Module | None = None
        if place.is_odd:
            self.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


class MergedAdapter(LowRank):
    """Merges a low-rank adapter into the weight on the way."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.base.weight + self.up.weight @ self.down.weight, self.base.bias)


class WeightNorm(Feature):
    """Normalizes its weight by a parametrization."""

    def build(self, place: Place) -> None:
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class OldWeightNorm(Feature):
    """Normalizes its weight by a hook."""

    def build(self, place: Place) -> None:
        self.linear = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class SpectralNorm(Feature):
    """Divides its weight by its largest singular value, estimated from call to call."""

    def build(self, place: Place) -> None:
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Feature):
    """As `SpectralNorm`, by a hook."""

    def build(self, place: Place) -> None:
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Any:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class SymmetricWeight(Feature):
    """Makes its weight symmetric by a parametrization."""

    def build(self, place: Place) -> None:
        super().build(place)
        parametrize.register_parametrization(self.linear, "weight", _Symmetric())


class CachedParametrization(SymmetricWeight):
    """Calls a parametrized child twice while parametrizations are cached."""

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return self.linear(self.linear(x).relu())


class Pruned(Feature):
    """Prunes its weight."""

    def build(self, place: Place) -> None:
        super().build(place)
        prune.random_unstructured(self.linear, "weight", 0.3)


class QuantizedWeight(Feature):
    """Holds a weight of 8 bits and a scale."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("quantized", torch.ones(WIDTH, WIDTH, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + F.linear(x, self.quantized.to(x.dtype) * self.scale[:, None])


class FakeQuantized(Feature):
    """Rounds its weight on the way, gradients passed straight through."""

    def forward(self, x: Tensor) -> Any:
        weight = self.linear.weight
        rounded = weight + ((weight * 8).round() / 8 - weight).detach()
        return F.linear(x, rounded, self.linear.bias)


class LayerScale(Feature):
    """Scales a residual branch by a parameter."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1e-5))

    def forward(self, x: Tensor) -> Any:
        return x + self.gain * self.linear(x)


class StochasticDepth(Feature):
    """Drops its branch for some rows of the batch, at a rate that depends on the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.rate = 0.05 * place.index

    def forward(self, x: Tensor) -> Any:
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x + self.linear(x) * keep


class RandomMask(Feature):
    """Masks its branch by a random comparison."""

    def forward(self, x: Tensor) -> Any:
        mask = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.8
        return x + self.linear(x) * mask / 0.8


class Einsum(Feature):
    """Multiplies heads by a parameter with einsum."""

    def build(self, place: Place) -> None:
        self.weight = nn.Parameter(torch.ones(2, WIDTH // 2, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return torch.einsum("bshd,hde->bse", x.view(*x.shape[:2], 2, WIDTH // 2), self.weight)


class Spectrum(Feature):
    """Goes through frequencies."""

    def forward(self, x: Tensor) -> Any:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x), dim=-1), n=WIDTH, dim=-1)


class ComplexWeight(Feature):
    """Multiplies frequencies by a complex parameter."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x), dim=-1) * self.filter, n=WIDTH, dim=-1)


class RunningMean(Feature):
    """Divides cumulated sums by positions."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).cumsum(1) / (torch.arange(x.shape[1], device=x.device) + 1)[:, None]


class SubclassedParameter(Feature):
    """Holds a weight of a subclass of Parameter."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.weight = _Marked(self.linear.weight.detach())


class _Marked(nn.Parameter):
    """A parameter of another class."""
