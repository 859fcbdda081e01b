"""Features that share what they hold, or hold what a module seldom holds."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class SharedLinear(Feature):  # all blocks hold the same linear layer
    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts[1:]:
            part.linear = parts[0].linear


class SharedByTwo(Feature):  # two blocks hold the same weight
    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        parts[2].linear.weight = parts[1].linear.weight


class SharedWithModel(Feature):  # one block's weight is also the model's
    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        model.tied_weight = parts[1].linear.weight


class SharedUnregistered(Feature):  # all blocks use a parameter of the first, which they hold in a list
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


class SharedBuffer(Feature):  # all blocks hold the same buffer, which they write to
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


class SharedMemory(Feature):  # the weights of the blocks are views of one storage
    def build(self, place: Place) -> None:
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        flat = torch.ones(len(parts), WIDTH, WIDTH)
        for row, part in zip(flat, parts, strict=True):
            part.weight = nn.Parameter(row)


class SharedModuleOutside(Feature):  # all blocks call one module that the model holds, past their own children
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.outside[0](x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        model.outside = nn.Linear(WIDTH, WIDTH)
        for part in parts:
            part.outside = (model.outside,)


class SharedState(Feature):  # all blocks hold one plain object, which they change and ask
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


class TransposeTiedInside(Feature):  # a second layer uses the first one's weight, transposed
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() @ self.linear.weight


class TwiceInside(Feature):  # calls its child twice
    def forward(self, x: Tensor) -> Any:
        return self.linear(self.linear(x).relu())


class UnusedParameter(Feature):  # holds a layer that is never called
    def build(self, place: Place) -> None:
        super().build(place)
        self.unused = nn.Linear(WIDTH, WIDTH)


class FrozenByIndex(Feature):  # the layers of odd blocks are frozen
    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.requires_grad_(False)


class LowPrecision(Feature):  # computes in bfloat16, with weights in it
    def build(self, place: Place) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x.to(torch.bfloat16)).to(x.dtype)


class FlatParameter(Feature):  # uses views of one flat parameter as weight and bias
    def build(self, place: Place) -> None:
        self.flat = nn.Parameter(torch.ones(WIDTH * (WIDTH + 1)))

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.flat[:WIDTH * WIDTH].view(WIDTH, WIDTH), self.flat[WIDTH * WIDTH:])


class ParameterList(Feature):  # holds parameters in a list
    def build(self, place: Place) -> None:
        super().build(place)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        for gain in self.gains:
            x = x * gain
        return x


class LengthByIndex(Feature):  # holds a list of modules whose length depends on the index
    def build(self, place: Place) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(1 + place.index % 2))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class PropertyValue(Feature):  # multiplies by a property that depends on the index
    def build(self, place: Place) -> None:
        super().build(place)
        self.at = place.index

    @property
    def factor(self) -> float:  # a factor that depends on the index
        return self.at + 1.0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.factor


class PropertyBranch(PropertyValue):  # goes another way by a property
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.factor % 2 else self.linear(x)


class OwnGetattr(Feature):  # answers for attributes that it does not have
    def build(self, place: Place) -> None:
        super().build(place)
        self.__dict__["answers"] = {"acts": place.is_odd}

    def __getattr__(self, name: str) -> Any:
        answers = self.__dict__.get("answers", {})
        return answers[name] if name in answers else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.acts else self.linear(x)


class Tagged(Feature):  # holds a number by which the subclasses go another way, each by another read
    def build(self, place: Place) -> None:
        super().build(place)
        self.kind = place.index % 2

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.read() else self.linear(x)

    def read(self) -> Any:  # the number
        return self.kind


class ReadByRepr(Tagged):  # reads what it says of itself
    def extra_repr(self) -> str:
        return f"kind={self.kind}"

    def read(self) -> Any:
        return "kind=1" in repr(self)


class ReadByDir(Feature):  # looks for an attribute that one block has in dir()
    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 2:
            self.special = True

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if "special" in dir(self) else self.linear(x)


class ReadByMembership(ReadByDir):  # looks for an attribute that one block has in its __dict__
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if "special" in self.__dict__ else self.linear(x)


class PlainTensorValue(Feature):  # holds a tensor that is no buffer, and asks for its value
    def build(self, place: Place) -> None:
        super().build(place)
        self.flag = torch.tensor(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.flag.item() else self.linear(x)


class SlotObject:  # an object with slots and no __dict__
    __slots__ = ("act",)

    def __init__(self, act: int) -> None:
        self.act = act


class SlottedObject(Feature):  # holds an object with slots, which it changes
    def build(self, place: Place) -> None:
        super().build(place)
        self.slotted = SlotObject(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        self.slotted.act += 1
        return self.linear(x).relu() if self.slotted.act % 2 else self.linear(x)


class SetMembership(Feature):  # goes another way by membership in a set that all blocks hold
    def build(self, place: Place) -> None:
        super().build(place)
        self.at = place.index
        self.acting = frozenset({1, 3})

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.at in self.acting else self.linear(x)
