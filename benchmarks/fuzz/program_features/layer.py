"""Features that are layers: of the library, by their index, with adapters, routed by data."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .feature import WIDTH, Place, feature, linear

HIDDEN = 2 * WIDTH
# a residual feed-forward layer
FeedForward = feature(lambda self, x: x + self.down(F.gelu(self.up(x))), alone=True,
                      up=lambda at: linear(WIDTH, HIDDEN), down=lambda at: linear(HIDDEN, WIDTH))
# the same with an activation that writes to its input
InPlaceActivation = feature(lambda self, x: x + self.down(self.act(self.up(x))), alone=True,
                            up=lambda at: linear(WIDTH, HIDDEN), down=lambda at: linear(HIDDEN, WIDTH),
                            act=lambda at: nn.ReLU(inplace=True))
# a batch norm over the length
BatchNorm = feature(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), alone=True,
                    norm=lambda at: nn.BatchNorm1d(WIDTH, momentum=None if at.count == 5 else 0.1))


def _channels_last(at: Place) -> nn.Module:
    made: Any = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    return made.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


# a convolution over an image of one column, with a batch norm, in channels-last format
@feature(alone=True, convolution=_channels_last, norm=lambda at: nn.BatchNorm2d(WIDTH))
def ImageConvolution(self: Any, x: Tensor) -> Any:
    image = x.transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last)
    return x + self.norm(self.convolution(image))[..., 0].transpose(1, 2)


# the library's attention, with weights in every second model
MultiheadAttention = feature(
    lambda self, x: x + self.attention(x, x, x, need_weights=self.with_weights)[0], alone=True,
    attention=lambda at: nn.MultiheadAttention(WIDTH, 2, batch_first=True), with_weights=lambda at: at.count % 2 == 0)


# attention by the fused function, causal, with dropout in training
@feature(alone=True, qkv=lambda at: linear(WIDTH, 3 * WIDTH), out=lambda at: linear())
def CausalAttention(self: Any, x: Tensor) -> Any:
    query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1 * self.training)
    return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


# attention written out, with a mask kept as a buffer
@feature(alone=True, mask=lambda at: nn.Buffer(torch.tril(torch.ones(64, 64, dtype=torch.bool)), persistent=False))
def MaskedAttention(self: Any, x: Tensor) -> Any:
    length = x.shape[1]
    scores = (x @ x.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
    return scores.softmax(-1) @ x


# a recurrent layer of the library
Recurrent = feature(lambda self, x: self.recurrent(x)[0], alone=True,
                    recurrent=lambda at: nn.GRU(WIDTH, WIDTH, batch_first=True))
# the library's encoder layer, which has a fast path for inference
EncoderLayer = feature(lambda self, x: self.encoder(x), alone=True,
                       encoder=lambda at: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True))
# a dropout whose rate depends on the index, 0 for some
DropoutByIndex = feature(lambda self, x: self.dropout(x), alone=True,
                         dropout=lambda at: nn.Dropout(0.1 * (at.index % 3)))
# multiplies by a number that depends on the index
ScaleByIndex = feature(lambda self, x: x * self.scale + math.log(self.scale + 1), alone=True,
                       scale=lambda at: 1 / math.sqrt(at.index + 1))
# goes another way in blocks of odd index
ActsByIndex = feature(lambda self, x: self.linear(x) if self.layer_index % 2 else self.linear(x).relu(),
                      layer_index=lambda at: at.index)
# goes another way by a string that depends on the index
ActsByName = feature(lambda self, x: getattr(F, self.activation)(self.linear(x)),
                     activation=lambda at: ("relu", "gelu", "relu")[at.index % 3])


def _make_act(index: int) -> Callable[[Tensor], Tensor]:  # a function that depends on the index
    return lambda t: t * index if index % 2 else t.relu()


# calls a lambda that knows the index
ActsByLambda = feature(lambda self, x: self.act(self.linear(x)), act=lambda at: _make_act(at.index))


# runs a second child in some blocks
@feature(second=lambda at: linear(), runs_second=lambda at: at.index % 4 == 1)
def RunsByIndex(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    return self.second(x) if self.runs_second else x


# has a hidden width that depends on the index
WidthByIndex = feature(lambda self, x: self.down(self.up(x).relu()), alone=True,
                       up=lambda at: linear(WIDTH, WIDTH * (1 + at.index // 3)),
                       down=lambda at: linear(WIDTH * (1 + at.index // 3), WIDTH))


# turns its input by the position
@feature(frequencies=lambda at: nn.Buffer(1.0 / 10000**(torch.arange(0, WIDTH, 2).float() / WIDTH), persistent=False))
def Rotary(self: Any, x: Tensor) -> Any:
    angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequencies)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = x.chunk(2, -1)
    return self.linear(x * cos + torch.cat([-second, first], -1) * sin)


# sends rows to experts by their gates
@feature(alone=True, gate=lambda at: linear(WIDTH, 3), experts=lambda at: nn.ModuleList(linear() for _ in range(3)))
def Experts(self: Any, x: Tensor) -> Any:
    rows = x.reshape(-1, WIDTH)
    weights, chosen = self.gate(rows).softmax(-1).max(-1)
    out = torch.zeros_like(rows)
    for index, expert in enumerate(self.experts):
        own = (chosen == index).nonzero().squeeze(-1)
        out = out.index_add(0, own, expert(rows[own]) * weights[own][:, None])
    return out.view(x.shape)


# multiplies by a number that it asks for, which follows from the shape
KnownItem = feature(lambda self, x: self.linear(x) * torch.arange(x.shape[1], device=x.device).sum().item())


@feature  # computes with the rows that a mask of data chooses
def MaskedRows(self: Any, x: Tensor) -> Any:
    rows = x.reshape(-1, WIDTH)
    chosen = rows[rows.sum(-1) > 0]
    return self.linear(x) + self.linear(chosen).mean()


@feature  # masks by lengths made on the way
def PaddedLengths(self: Any, x: Tensor) -> Any:
    lengths = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
    mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
    return self.linear(x) * mask[..., None]


# adds a low-rank adapter to a frozen layer
LowRank = feature(lambda self, x: self.base(x) + self.up(self.down(x)) * 0.5, alone=True,
                  base=lambda at: linear().requires_grad_(False), down=lambda at: linear(WIDTH, 4, bias=False),
                  up=lambda at: linear(4, WIDTH, bias=False))
# normalizes its weight by a parametrization, and by a hook
WeightNorm = feature(lambda self, x: self.linear(x), alone=True,
                     linear=lambda at: parametrizations.weight_norm(linear()))
OldSpectralNorm = feature(lambda self, x: self.linear(x), alone=True,
                          linear=lambda at: nn.utils.spectral_norm(linear()))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Any:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _make_symmetric(self: Any, at: Place) -> None:
    parametrize.register_parametrization(self.linear, "weight", _Symmetric())


# makes its weight symmetric by a parametrization
SymmetricWeight = feature(lambda self, x: self.linear(x), also=_make_symmetric)


@feature(also=_make_symmetric)  # calls a parametrized child twice while parametrizations are cached
def CachedParametrization(self: Any, x: Tensor) -> Any:
    with parametrize.cached():
        return self.linear(self.linear(x).relu())


# holds a weight of 8 bits and a scale
QuantizedWeight = feature(
    lambda self, x: self.linear(x) + F.linear(x, self.quantized.to(x.dtype) * self.scale[:, None]),
    quantized=lambda at: nn.Buffer(torch.ones(WIDTH, WIDTH, dtype=torch.int8)),
    scale=lambda at: nn.Parameter(torch.ones(WIDTH)))


# drops its branch for some rows of the batch, at a rate that depends on the index
@feature(rate=lambda at: 0.05 * at.index)
def StochasticDepth(self: Any, x: Tensor) -> Any:
    keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
    return x + self.linear(x) * keep


class _Marked(nn.Parameter):
    """A parameter of another class."""


# holds a weight of a subclass of Parameter
SubclassedParameter = feature(lambda self, x: self.linear(x), also=lambda self, at: setattr(
    self.linear, "weight", _Marked(self.linear.weight.detach())))
