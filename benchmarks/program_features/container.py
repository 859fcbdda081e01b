"""Features about what a block holds, and how it reads that: containers, attributes, properties, objects."""
from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place

read_kind = operator.attrgetter("kind")


class ParameterList(Feature):
    """Holds parameters in a list."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        for gain in self.gains:
            x = x * gain
        return x


class ParameterDictionary(Feature):
    """Holds parameters in a dictionary."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.affine = nn.ParameterDict({"gain": nn.Parameter(torch.ones(WIDTH)), "b": nn.Parameter(torch.ones(WIDTH))})

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.affine["gain"] + self.affine["b"]


class ReversedList(Feature):
    """Calls the modules of a list from the last on."""

    def build(self, place: Place) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class LengthByIndex(Feature):
    """Holds a list of modules whose length depends on the index."""

    def build(self, place: Place) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(1 + place.index % 2))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class ModuleDictionary(Feature):
    """Calls the modules of a dictionary by their names."""

    def build(self, place: Place) -> None:
        names = ("a", "b") if place.index != 1 else ("b", "a")
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: Tensor) -> Any:
        for name, layer in self.layers.items():
            x = layer(x) if name == "a" else layer(x).relu()
        return x


class SumOfLayers(Feature):
    """Adds the results of its layers up by a generator expression."""

    def build(self, place: Place) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return sum(layer(x) for layer in self.layers)


class NestedSequential(Feature):
    """Holds sequences in a sequence."""

    def build(self, place: Place) -> None:
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class PropertyValue(Feature):
    """Multiplies by a property that depends on the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.at = place.index

    @property
    def factor(self) -> float:
        """A factor that depends on the index."""
        return self.at + 1.0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.factor


class PropertyBranch(PropertyValue):
    """Goes another way by a property."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.factor % 2 else self.linear(x)


class OwnGetattr(Feature):
    """Answers for attributes that it does not have."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.__dict__["answers"] = {"acts": place.is_odd}

    def __getattr__(self, name: str) -> Any:
        answers = self.__dict__.get("answers", {})
        return answers[name] if name in answers else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.acts else self.linear(x)


class OwnGetattribute(Feature):
    """Watches reads of its attributes itself."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.kind = place.index % 2

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value + 1 if name == "kind" else value

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.kind == 2 else self.linear(x)


class Tagged(Feature):
    """Holds a number by which the subclasses go another way, each by another read."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.kind = place.index % 2

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.read() else self.linear(x)

    def read(self) -> Any:
        """The number."""
        return self.kind


class ReadByDictionary(Tagged):
    """Reads its own __dict__."""

    def read(self) -> Any:
        return self.__dict__["kind"]


class ReadByVars(Tagged):
    """Reads by vars()."""

    def read(self) -> Any:
        return vars(self)["kind"]


class ReadByObject(Tagged):
    """Reads past its class."""

    def read(self) -> Any:
        return object.__getattribute__(self, "kind")


class ReadByGetter(Tagged):
    """Reads by a function of operator."""

    def read(self) -> Any:
        return read_kind(self)


class ReadByRepr(Tagged):
    """Reads what it says of itself."""

    def extra_repr(self) -> str:
        return f"kind={self.kind}"

    def read(self) -> Any:
        return "kind=1" in repr(self)


class ReadByMatch(Tagged):
    """Reads by a match statement's subject: a tuple of attributes."""

    def read(self) -> Any:
        return (self.training, self.kind)[1] == 1


class ReadByDir(Feature):
    """Looks for an attribute that one block has in dir()."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 2:
            self.special = True

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if "special" in dir(self) else self.linear(x)


class ReadByDefault(ReadByDir):
    """Reads an attribute that one block has, with a default."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if getattr(self, "special", False) else self.linear(x)


class ReadByPresence(ReadByDir):
    """Asks whether it has an attribute, which one block has."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if hasattr(self, "special") else self.linear(x)


class ReadByMembership(ReadByDir):
    """Looks for an attribute that one block has in its __dict__."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if "special" in self.__dict__ else self.linear(x)


class ReadOfChild(Feature):
    """Reads an attribute that it gave to its child."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.tag = place.index % 2

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.linear.tag else self.linear(x)


class ReadOfState(Feature):
    """Reads the length of its state dict and of its list of parameters."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if len(self.state_dict()) > 2 else self.linear(x) * len(list(self.parameters()))


class SumOfParameters(Feature):
    """Adds the sum of all its parameters."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + 0 * sum(p.sum() for p in self.parameters())


class WeightNorm(Feature):
    """Adds the norm of a child's weight."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.linear.weight.norm()


class AppliesFunction(Feature):
    """Applies a function to all its modules, which does nothing."""

    def forward(self, x: Tensor) -> Any:
        self.apply(lambda module: None)
        return self.linear(x)


class PlainTensor(Feature):
    """Holds a tensor that is no buffer."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.shift = torch.full((WIDTH,), float(place.index))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.shift.to(x.device)


class PlainTensorValue(Feature):
    """Holds a tensor that is no buffer, and asks for its value."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.flag = torch.tensor(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.flag.item() else self.linear(x)


class ListOfTensors(Feature):
    """Holds tensors in a list."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.shifts = [torch.ones(WIDTH), torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.shifts[0].to(x.device) + self.shifts[1].to(x.device)


class PlainArray(Feature):
    """Holds a NumPy array, and asks for a value."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.array = np.full((WIDTH,), place.index % 3)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.array[0] == 2 else self.linear(x)


@dataclass
class Settings:
    """Settings of a block."""

    act: int = 0
    scale: float = 1.0


class PlainObject(Feature):
    """Holds an object and asks for its attribute."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.settings = Settings(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.settings.act else self.linear(x)


@dataclass(frozen=True)
class FrozenSettings:
    """Settings that cannot change."""

    act: int = 0


class FrozenObject(Feature):
    """Holds an object that cannot change."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.settings = FrozenSettings(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.settings.act else self.linear(x)


class Kind(Enum):
    """Kinds of blocks."""

    PLAIN = "plain"
    ACTING = "acting"


class EnumBranch(Feature):
    """Goes another way by a member of an enumeration."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.kind_of_block = Kind.ACTING if place.is_odd else Kind.PLAIN

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.kind_of_block is Kind.ACTING else self.linear(x)


class SlotObject:
    """An object with slots and no __dict__."""

    __slots__ = ("act",)

    def __init__(self, act: int) -> None:
        self.act = act


class SlottedObject(Feature):
    """Holds an object with slots, which it changes."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.slotted = SlotObject(place.index % 2)

    def forward(self, x: Tensor) -> Any:
        self.slotted.act += 1
        return self.linear(x).relu() if self.slotted.act % 2 else self.linear(x)


class UnchangedIterator(Feature):
    """Holds an iterator that it never asks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.numbers = itertools.count()


class SetMembership(Feature):
    """Goes another way by membership in a set that all blocks hold."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.at = place.index
        self.acting = frozenset({1, 3})

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.at in self.acting else self.linear(x)
