"""Features that know where they are: by parents, siblings, identities, and modules made anew."""
from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place

roots: list[Any] = []


class _Linked(Feature):  # knows the model
    def build(self, place: Place) -> None:
        super().build(place)
        self.__dict__["parent"] = None

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        roots[:] = [model]
        for part in parts:
            part.__dict__["parent"] = model
            part.__dict__["siblings"] = parts

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.is_special() else self.linear(x)

    def is_special(self) -> Any:  # whether it is one of those that go another way
        raise NotImplementedError


class CountsInParent(_Linked):  # counts in an attribute of its parent
    def is_special(self) -> Any:
        self.parent.calls_of_parts = getattr(self.parent, "calls_of_parts", 0) + 1
        return bool(self.parent.calls_of_parts % 2)


class ParentsParameter(_Linked):  # uses a parameter of its parent
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.parent.gain


class WeakParent(Feature):  # knows its model by a weak reference
    def build(self, place: Place) -> None:
        super().build(place)
        self.weak: Any = None

    def forward(self, x: Tensor) -> Any:
        is_first = any(m is self for m in self.weak().blocks[0].modules())
        return self.linear(x).relu() if is_first else self.linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts:
            part.weak = weakref.ref(model)


class UsesSibling(Feature):  # calls the child of the block before it
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.previous[0].linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for previous, part in zip([parts[0], *parts], parts, strict=False):
            part.previous = (previous,)


class WritesToSibling(Feature):  # sets an attribute of the block after it, which that one reads
    def build(self, place: Place) -> None:
        super().build(place)
        self.told = 0

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).relu() if self.told else self.linear(x)
        for following in self.__dict__.get("after", ()):
            following.told = 1 - self.told
        return y

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        for part, following in zip(parts, parts[1:], strict=False):
            part.__dict__["after"] = [following]


class Identity(Feature):  # goes another way where its id is that of a block noted before
    noted: int = 0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2) if id(self) == type(self).noted else self.linear(x + 1)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        type(parts[1]).noted = id(parts[1])


class CallerBranch(Feature):  # goes another way by the function that calls it
    def forward(self, x: Tensor) -> Any:
        frame, depth = sys._getframe(), 0
        while frame is not None and depth < 40:
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        return self.linear(x) if depth else x


class WeakToInput(Feature):  # keeps a weak reference to its input, and asks in the next call whether it lives
    def build(self, place: Place) -> None:
        super().build(place)
        self.weak_input: Any = None

    def forward(self, x: Tensor) -> Any:
        lives = self.weak_input is not None and self.weak_input() is not None
        self.weak_input = weakref.ref(x)
        return self.linear(x).relu() if lives else self.linear(x)


class NewDropout(Feature):  # makes a dropout in each call
    def forward(self, x: Tensor) -> Any:
        return nn.Dropout(0.1)(self.linear(x))


class NewLinear(Feature):  # makes a layer with parameters in each call, which nothing holds after it
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + nn.Linear(WIDTH, WIDTH, device=x.device)(x.detach())


class EvalChild(Feature):  # the dropout of odd blocks is in evaluation mode
    def build(self, place: Place) -> None:
        super().build(place)
        self.dropout = nn.Dropout(0.1)
        if place.is_odd:
            self.dropout.eval()

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.linear(x))


class FlagBranch(Feature):  # goes another way in training, and where gradients are enabled
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.training and torch.is_grad_enabled() else self.linear(x)
