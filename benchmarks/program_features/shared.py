"""Features that share parameters, buffers or modules between blocks, or within one."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class SharedLinear(Feature):
    """All blocks hold the same linear layer."""

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts[1:]:
            part.linear = parts[0].linear


class SharedByTwo(Feature):
    """Two blocks hold the same weight."""

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        parts[2].linear.weight = parts[1].linear.weight


class SharedWithModel(Feature):
    """One block's weight is also the model's."""

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        model.tied_weight = parts[1].linear.weight


class SharedUnregistered(Feature):
    """All blocks use a parameter of the first, which they hold in a list."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.borrowed: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.borrowed[0]

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        gain = nn.Parameter(torch.ones(WIDTH))
        model.register_parameter("gain_of_all", gain)
        for part in parts:
            part.borrowed.append(gain)


class SharedBuffer(Feature):
    """All blocks hold the same buffer, which they write to."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.total.add_(x.mean((0, 1)))
        return self.linear(x) + self.total

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts[1:]:
            part.total = parts[0].total


class SharedTable(SharedBuffer):
    """All blocks hold the same buffer, which they only read."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.total


class SharedMemory(Feature):
    """The weights of the blocks are views of one storage."""

    def build(self, place: Place) -> None:
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        flat = torch.ones(len(parts), WIDTH, WIDTH)
        for row, part in zip(flat, parts, strict=True):
            part.weight = nn.Parameter(row)


class SharedModuleOutside(Feature):
    """All blocks call one module that the model holds, past their own children."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.outside[0](x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        model.outside = nn.Linear(WIDTH, WIDTH)
        for part in parts:
            part.outside = (model.outside,)


class SharedState(Feature):
    """All blocks hold one plain object, which they change and ask."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.counts: dict[str, int] = {}

    def forward(self, x: Tensor) -> Any:
        self.counts["n"] = self.counts.get("n", 0) + 1
        return self.linear(x).relu() if self.counts["n"] % 2 else self.linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts[1:]:
            part.counts = parts[0].counts


class TiedInside(Feature):
    """Two children of a block hold one weight."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.linear.weight

    def forward(self, x: Tensor) -> Any:
        return self.second(self.linear(x).relu())


class TransposeTiedInside(Feature):
    """A second layer uses the first one's weight, transposed."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() @ self.linear.weight


class TwiceInside(Feature):
    """Calls its child twice."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.linear(x).relu())


class SameChildTwice(Feature):
    """Holds one child under two names."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.alias = self.linear

    def forward(self, x: Tensor) -> Any:
        return self.alias(self.linear(x).relu())


class TwoBlocksSwapped(Feature):
    """Two blocks hold each other's child."""

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        parts[0].linear, parts[1].linear = parts[1].linear, parts[0].linear


class UnusedParameter(Feature):
    """Holds a layer that is never called."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.unused = nn.Linear(WIDTH, WIDTH)


class FrozenByIndex(Feature):
    """The layers of odd blocks are frozen."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.requires_grad_(False)


class FrozenFirst(Feature):
    """The first two blocks are frozen."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index < 2:
            self.requires_grad_(False)


class FrozenBias(Feature):
    """Every bias is frozen."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.bias.requires_grad_(False)


class LowPrecision(Feature):
    """Computes in bfloat16, with weights in it."""

    def build(self, place: Place) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x.to(torch.bfloat16)).to(x.dtype)


class PrecisionByIndex(Feature):
    """Computes in bfloat16 in odd blocks."""

    def build(self, place: Place) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16 if place.is_odd else torch.float32)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class TaggedParameter(Feature):
    """Goes another way by an attribute of its weight."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.weight.tag = place.index % 2

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if getattr(self.linear.weight, "tag", 0) else self.linear(x)


class TaggedBuffer(Feature):
    """Goes another way by an attribute of a buffer."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("shift", torch.ones(WIDTH))
        self.shift.tag = place.index % 2

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if getattr(self.shift, "tag", 0) else self.linear(x) + self.shift


class FlatParameter(Feature):
    """Uses views of one flat parameter as weight and bias."""

    def build(self, place: Place) -> None:
        self.flat = nn.Parameter(torch.ones(WIDTH * (WIDTH + 1)))

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.flat[:WIDTH * WIDTH].view(WIDTH, WIDTH), self.flat[WIDTH * WIDTH:])
