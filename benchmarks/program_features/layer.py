"""Features that are plain layers, and ones that differ from block to block by the block's index."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class FeedForward(Feature):
    """A residual feed-forward layer."""

    def build(self, place: Place) -> None:
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class InPlaceActivation(FeedForward):
    """A feed-forward layer whose activation writes to its input."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.act(self.up(x)))


class LayerNorm(Feature):
    """A layer norm."""

    def build(self, place: Place) -> None:
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class BatchNorm(Feature):
    """A batch norm over the length."""

    def build(self, place: Place) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if place.count == 5 else 0.1)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class GroupNorm(Feature):
    """A group norm."""

    def build(self, place: Place) -> None:
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2).contiguous()


class Convolution(Feature):
    """A convolution over the length."""

    def build(self, place: Place) -> None:
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class ImageConvolution(Feature):
    """A convolution over an image of one column, with a batch norm, in channels-last format."""

    def build(self, place: Place) -> None:
        made: Any = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.convolution = made.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        image = x.transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last)
        return x + self.norm(self.convolution(image))[..., 0].transpose(1, 2)


class MultiheadAttention(Feature):
    """The library's attention, with weights in every second model."""

    def build(self, place: Place) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.with_weights = place.count % 2 == 0

    def forward(self, x: Tensor) -> Any:
        return x + self.attention(x, x, x, need_weights=self.with_weights)[0]


class CausalAttention(Feature):
    """Attention by the fused function, causal, with dropout in training."""

    def build(self, place: Place) -> None:
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1 * self.training)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class MaskedAttention(Feature):
    """Attention written out, with a mask kept as a buffer."""

    def build(self, place: Place) -> None:
        self.register_buffer("mask", torch.tril(torch.ones(64, 64, dtype=torch.bool)), persistent=False)

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        return scores.softmax(-1) @ x


class Recurrent(Feature):
    """A recurrent layer of the library."""

    def build(self, place: Place) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.recurrent(x)[0]


class RecurrentLoop(Feature):
    """A recurrence written as a loop over the length."""

    def forward(self, x: Tensor) -> Any:
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, at]) + state)
            states.append(state)
        return torch.stack(states, 1)


class EncoderLayer(Feature):
    """The library's encoder layer, which has a fast path for inference."""

    def build(self, place: Place) -> None:
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.encoder(x)


class DecoderLayer(Feature):
    """The library's decoder layer, which attends to its own input."""

    def build(self, place: Place) -> None:
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.decoder(x, x)


class Dropout(Feature):
    """A dropout of the same rate everywhere."""

    def build(self, place: Place) -> None:
        self.dropout = nn.Dropout(0.1 * (place.count % 3))

    def forward(self, x: Tensor) -> Any:
        return self.dropout(x)


class DropoutByIndex(Feature):
    """A dropout whose rate depends on the index, 0 for some."""

    def build(self, place: Place) -> None:
        self.dropout = nn.Dropout(0.1 * (place.index % 3))

    def forward(self, x: Tensor) -> Any:
        return self.dropout(x)


class FunctionalDropoutByIndex(Feature):
    """As `DropoutByIndex`, by the function."""

    def build(self, place: Place) -> None:
        self.rate = 0.1 * (place.index % 3)

    def forward(self, x: Tensor) -> Any:
        return F.dropout(x, self.rate, self.training)


class ScaleByIndex(Feature):
    """Multiplies by a number that depends on the index."""

    def build(self, place: Place) -> None:
        self.scale = 1 / math.sqrt(place.index + 1)

    def forward(self, x: Tensor) -> Any:
        return x * self.scale + math.log(self.scale + 1)


class ActsByIndex(Feature):
    """Goes another way in blocks of odd index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.layer_index = place.index

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if self.layer_index % 2 else self.linear(x).relu()


class ActsInFirst(ActsByIndex):
    """Goes another way in the first block."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2 if self.layer_index == 0 else x)


class ActsInLast(Feature):
    """Goes another way in all blocks but the last."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.is_last = place.index == place.count - 1

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if self.is_last else F.gelu(self.linear(x))


class ActsByName(Feature):
    """Goes another way by a string that depends on the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.activation = ("relu", "gelu", "relu")[place.index % 3]

    def forward(self, x: Tensor) -> Any:
        return getattr(F, self.activation)(self.linear(x))


class ActsByEnding(Feature):
    """Goes another way by the ending of its own name."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.block_name = f"layer{place.index}"

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.block_name.endswith("2") else self.linear(x)


class ActsByList(Feature):
    """Multiplies by a number in a list."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.factors = [1.0, float(place.index)]

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.factors[1]


class ActsByEntry(Feature):
    """Goes another way by an entry of a dictionary."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.settings = {"act": place.is_odd, "scale": 2.0}

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.settings["act"] else self.linear(x) * self.settings["scale"]


class ActsByFunction(Feature):
    """Calls a function that it holds, one of two."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.act = F.relu if place.is_odd else F.gelu

    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x))


class ActsByLambda(Feature):
    """Calls a lambda that knows the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.act = self.make_act(place.index)

    @staticmethod
    def make_act(index: int) -> Callable[[Tensor], Tensor]:
        """A function that depends on the index."""
        return lambda t: t * index if index % 2 else t.relu()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x))


class ActsByPartial(Feature):
    """Calls a partial function whose argument depends on the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1 * place.index, inplace=place.is_odd)

    def forward(self, x: Tensor) -> Any:
        return self.act(self.linear(x))


class RunsByIndex(Feature):
    """Runs a second child in some blocks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.runs_second = place.index % 4 == 1

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return self.second(x) if self.runs_second else x


class ShiftedWindow(Feature):
    """Rolls the sequence in blocks of odd index, as shifted windows do."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.shift = 2 * (place.index % 2)

    def forward(self, x: Tensor) -> Any:
        if not self.shift:
            return self.linear(x)
        return torch.roll(self.linear(torch.roll(x, -self.shift, 1)), self.shift, 1)


class TypeByIndex(Feature):
    """Has a linear layer or none, by the index."""

    def build(self, place: Place) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH) if place.index % 3 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class WidthByIndex(Feature):
    """Has a hidden width that depends on the index."""

    def build(self, place: Place) -> None:
        width = WIDTH * (1 + place.index // 3)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).relu())


class Rotary(Feature):
    """Turns its input by the position."""

    def build(self, place: Place) -> None:
        super().build(place)
        steps = torch.arange(0, WIDTH, 2).float() / WIDTH
        self.register_buffer("frequencies", 1.0 / 10000**steps, persistent=False)

    def forward(self, x: Tensor) -> Any:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequencies)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return self.linear(x * cos + torch.cat([-second, first], -1) * sin)


class RelativePosition(Feature):
    """Adds a bias looked up by a buffer of positions."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.table = nn.Parameter(torch.zeros(64))
        self.register_buffer("positions", torch.arange(64).view(8, 8) % 7, persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.table[self.positions[:x.shape[1], :1]]


class PositionEmbedding(Feature):
    """Adds an embedding of positions."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.embedding = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.embedding(torch.arange(x.shape[1], device=x.device) % 10)
