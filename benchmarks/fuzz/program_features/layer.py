"""Features that are layers: of the library, by their index, with adapters, routed by data."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .feature import WIDTH, Feature, Place


class FeedForward(Feature):  # a residual feed-forward layer
    def build(self, place: Place) -> None:
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class InPlaceActivation(FeedForward):  # a feed-forward layer whose activation writes to its input
    def build(self, place: Place) -> None:
        super().build(place)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.act(self.up(x)))


class BatchNorm(Feature):  # a batch norm over the length
    def build(self, place: Place) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if place.count == 5 else 0.1)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class ImageConvolution(Feature):
    """A convolution over an image of one column, with a batch norm, in channels-last format."""

    def build(self, place: Place) -> None:
        made: Any = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.convolution = made.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        image = x.transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last)
        return x + self.norm(self.convolution(image))[..., 0].transpose(1, 2)


class MultiheadAttention(Feature):  # the library's attention, with weights in every second model
    def build(self, place: Place) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.with_weights = place.count % 2 == 0

    def forward(self, x: Tensor) -> Any:
        return x + self.attention(x, x, x, need_weights=self.with_weights)[0]


class CausalAttention(Feature):  # attention by the fused function, causal, with dropout in training
    def build(self, place: Place) -> None:
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1 * self.training)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class MaskedAttention(Feature):  # attention written out, with a mask kept as a buffer
    def build(self, place: Place) -> None:
        self.register_buffer("mask", torch.tril(torch.ones(64, 64, dtype=torch.bool)), persistent=False)

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        return scores.softmax(-1) @ x


class Recurrent(Feature):  # a recurrent layer of the library
    def build(self, place: Place) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.recurrent(x)[0]


class EncoderLayer(Feature):  # the library's encoder layer, which has a fast path for inference
    def build(self, place: Place) -> None:
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.encoder(x)


class DropoutByIndex(Feature):  # a dropout whose rate depends on the index, 0 for some
    def build(self, place: Place) -> None:
        self.dropout = nn.Dropout(0.1 * (place.index % 3))

    def forward(self, x: Tensor) -> Any:
        return self.dropout(x)


class ScaleByIndex(Feature):  # multiplies by a number that depends on the index
    def build(self, place: Place) -> None:
        self.scale = 1 / math.sqrt(place.index + 1)

    def forward(self, x: Tensor) -> Any:
        return x * self.scale + math.log(self.scale + 1)


class ActsByIndex(Feature):  # goes another way in blocks of odd index
    def build(self, place: Place) -> None:
        super().build(place)
        self.layer_index = place.index

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if self.layer_index % 2 else self.linear(x).relu()


class ActsByName(Feature):  # goes another way by a string that depends on the index
    def build(self, place: Place) -> None:
        super().build(place)
        self.activation = ("relu", "gelu", "relu")[place.index % 3]

    def forward(self, x: Tensor) -> Any:
        return getattr(F, self.activation)(self.linear(x))


class ActsByLambda(Feature):  # calls a lambda that knows the index
    def build(self, place: Place) -> None:
        super().build(place)
        self.act = self.make_act(place.index)

    @staticmethod
    def make_act(index: int) -> Callable[[Tensor], Tensor]:  # a function that depends on the index
        return lambda t: t * index if index % 2 else t.relu()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x))


class RunsByIndex(Feature):  # runs a second child in some blocks
    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.runs_second = place.index % 4 == 1

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return self.second(x) if self.runs_second else x


class WidthByIndex(Feature):  # has a hidden width that depends on the index
    def build(self, place: Place) -> None:
        width = WIDTH * (1 + place.index // 3)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).relu())


class Rotary(Feature):  # turns its input by the position
    def build(self, place: Place) -> None:
        super().build(place)
        steps = torch.arange(0, WIDTH, 2).float() / WIDTH
        self.register_buffer("frequencies", 1.0 / 10000**steps, persistent=False)

    def forward(self, x: Tensor) -> Any:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequencies)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return self.linear(x * cos + torch.cat([-second, first], -1) * sin)


class Experts(Feature):  # sends rows to experts by their gates
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


class KnownItem(Feature):  # multiplies by a number that it asks for, which follows from the shape
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * torch.arange(x.shape[1], device=x.device).sum().item()


class MaskedRows(Feature):  # computes with the rows that a mask of data chooses
    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        chosen = rows[rows.sum(-1) > 0]
        return self.linear(x) + self.linear(chosen).mean()


class PaddedLengths(Feature):  # masks by lengths made on the way
    def forward(self, x: Tensor) -> Any:
        lengths = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        return self.linear(x) * mask[..., None]


class LowRank(Feature):  # adds a low-rank adapter to a frozen layer
    def build(self, place: Place) -> None:
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * 0.5


class WeightNorm(Feature):  # normalizes its weight by a parametrization
    def build(self, place: Place) -> None:
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Feature):  # as `SpectralNorm`, by a hook
    def build(self, place: Place) -> None:
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Any:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class SymmetricWeight(Feature):  # makes its weight symmetric by a parametrization
    def build(self, place: Place) -> None:
        super().build(place)
        parametrize.register_parametrization(self.linear, "weight", _Symmetric())


class CachedParametrization(SymmetricWeight):  # calls a parametrized child twice while parametrizations are cached
    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return self.linear(self.linear(x).relu())


class QuantizedWeight(Feature):  # holds a weight of 8 bits and a scale
    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("quantized", torch.ones(WIDTH, WIDTH, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + F.linear(x, self.quantized.to(x.dtype) * self.scale[:, None])


class StochasticDepth(Feature):  # drops its branch for some rows of the batch, at a rate that depends on the index
    def build(self, place: Place) -> None:
        super().build(place)
        self.rate = 0.05 * place.index

    def forward(self, x: Tensor) -> Any:
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x + self.linear(x) * keep


class SubclassedParameter(Feature):  # holds a weight of a subclass of Parameter
    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.weight = _Marked(self.linear.weight.detach())


class _Marked(nn.Parameter):
    """A parameter of another class."""
