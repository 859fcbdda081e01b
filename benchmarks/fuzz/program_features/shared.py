"""Features that share what they hold, or hold what a module seldom holds."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place, branch, feature, linear


def _share(name: str) -> Callable[[Any, Sequence[Any]], None]:  # gives all parts what the first one holds
    def link(model: Any, parts: Sequence[Any]) -> None:
        for part in parts[1:]:
            setattr(part, name, getattr(parts[0], name))

    return link


# all blocks hold the same linear layer; two hold the same weight; one block's weight is also the model's
SharedLinear = feature(lambda self, x: self.linear(x), link=_share("linear"))
SharedByTwo = feature(lambda self, x: self.linear(x),
                      link=lambda model, parts: setattr(parts[2].linear, "weight", parts[1].linear.weight))
SharedWithModel = feature(lambda self, x: self.linear(x),
                          link=lambda model, parts: setattr(model, "tied_weight", parts[1].linear.weight))


def _lend_gain(model: Any, parts: Sequence[Any]) -> None:
    model.register_parameter("gain_of_all", nn.Parameter(torch.ones(WIDTH)))
    for part in parts:
        part.borrowed.append(model.gain_of_all)


# all blocks use a parameter of the model, which they hold in a list
SharedUnregistered = feature(lambda self, x: self.linear(x) * self.borrowed[0], borrowed=lambda at: [], link=_lend_gain)


# all blocks hold the same buffer, which they write to
@feature(total=lambda at: nn.Buffer(torch.zeros(WIDTH)), link=_share("total"))
def SharedBuffer(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.total.add_(x.mean((0, 1)))
    return self.linear(x) + self.total


def _cut_one(model: Any, parts: Sequence[Any]) -> None:
    for row, part in zip(torch.ones(len(parts), WIDTH, WIDTH), parts, strict=True):
        part.weight = nn.Parameter(row)


# the weights of the blocks are views of one storage
SharedMemory = feature(lambda self, x: x @ self.weight, alone=True, link=_cut_one,
                       weight=lambda at: nn.Parameter(torch.empty(WIDTH, WIDTH)))


def _call_outside(model: Any, parts: Sequence[Any]) -> None:
    model.outside = linear()
    for part in parts:
        part.outside = (model.outside,)


# all blocks call one module that the model holds, past their own children
SharedModuleOutside = feature(lambda self, x: self.linear(x) + self.outside[0](x), link=_call_outside)


@branch(counts=lambda at: {}, link=_share("counts"))  # all blocks hold one plain object, which they change and ask
def SharedState(self: Any, x: Tensor) -> Any:
    self.counts["n"] = self.counts.get("n", 0) + 1
    return self.counts["n"] % 2


# a second layer uses the first one's weight, transposed
TransposeTiedInside = feature(lambda self, x: self.linear(x).relu() @ self.linear.weight)
# calls its child twice
TwiceInside = feature(lambda self, x: self.linear(self.linear(x).relu()))
# holds a layer that is never called
UnusedParameter = feature(lambda self, x: self.linear(x), unused=lambda at: linear())
# the layers of odd blocks are frozen
FrozenByIndex = feature(lambda self, x: self.linear(x),
                        also=lambda self, at: self.linear.requires_grad_(not at.is_odd))
# computes in bfloat16, with weights in it
LowPrecision = feature(lambda self, x: x + self.linear(x.to(torch.bfloat16)).to(x.dtype), alone=True,
                       linear=lambda at: linear().to(torch.bfloat16))
# uses views of one flat parameter as weight and bias
FlatParameter = feature(
    lambda self, x: nn.functional.linear(x, self.flat[:WIDTH * WIDTH].view(WIDTH, WIDTH), self.flat[WIDTH * WIDTH:]),
    alone=True, flat=lambda at: nn.Parameter(torch.ones(WIDTH * (WIDTH + 1))))


# holds parameters in a list
@feature(gains=lambda at: nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)]))
def ParameterList(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    for gain in self.gains:
        x = x * gain
    return x


# holds a list of modules whose length depends on the index
@feature(alone=True, layers=lambda at: nn.ModuleList(linear() for _ in range(1 + at.index % 2)))
def LengthByIndex(self: Any, x: Tensor) -> Any:
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


# holds a number by which it goes another way
Tagged = branch(lambda self, x: self.kind, kind=lambda at: at.index % 2)


class ReadByRepr(Feature):  # reads what it says of itself
    def build(self, place: Place) -> None:
        super().build(place)
        self.kind = place.index % 2

    def extra_repr(self) -> str:
        return f"kind={self.kind}"

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if "kind=1" in repr(self) else self.linear(x)


def _mark_one(self: Any, at: Place) -> None:
    if at.index == 2:
        self.special = True


# look for an attribute that one block has in dir(), and in its __dict__
ReadByDir = branch(lambda self, x: "special" in dir(self), also=_mark_one)
ReadByMembership = branch(lambda self, x: "special" in self.__dict__, also=_mark_one)
# holds a tensor that is no buffer, and asks for its value
PlainTensorValue = branch(lambda self, x: self.flag.item(), flag=lambda at: torch.tensor(at.index % 2))


class SlotObject:  # an object with slots and no __dict__
    __slots__ = ("act",)

    def __init__(self, act: int) -> None:
        self.act = act


@branch(slotted=lambda at: SlotObject(at.index % 2))  # holds an object with slots, which it changes
def SlottedObject(self: Any, x: Tensor) -> Any:
    self.slotted.act += 1
    return self.slotted.act % 2


# goes another way by membership in a set that all blocks hold
SetMembership = branch(lambda self, x: self.at in self.acting, at=lambda at: at.index, acting=frozenset({1, 3}))
