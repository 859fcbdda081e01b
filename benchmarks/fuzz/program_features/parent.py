"""Features that know where they are: by parents, siblings, identities, and modules made anew."""
from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, branch, feature

roots: list[Any] = []


def _link_model(model: Any, parts: Sequence[Any]) -> None:
    roots[:] = [model]
    for part in parts:
        part.__dict__["parent"] = model
        part.__dict__["siblings"] = parts


@branch(link=_link_model)  # counts in an attribute of its parent
def CountsInParent(self: Any, x: Tensor) -> Any:
    self.parent.calls_of_parts = getattr(self.parent, "calls_of_parts", 0) + 1
    return self.parent.calls_of_parts % 2


# uses a parameter of its parent
ParentsParameter = feature(lambda self, x: self.linear(x) * self.parent.gain, link=_link_model)


def _link_weakly(model: Any, parts: Sequence[Any]) -> None:
    for part in parts:
        part.weak = weakref.ref(model)


# knows its model by a weak reference
WeakParent = branch(lambda self, x: any(m is self for m in self.weak().blocks[0].modules()), weak=None,
                    link=_link_weakly)


def _link_previous(model: Any, parts: Sequence[Any]) -> None:
    for previous, part in zip([parts[0], *parts], parts, strict=False):
        part.previous = (previous,)


# calls the child of the block before it
UsesSibling = feature(lambda self, x: self.linear(x) + self.previous[0].linear(x), link=_link_previous)


def _link_next(model: Any, parts: Sequence[Any]) -> None:
    for part, following in zip(parts, parts[1:], strict=False):
        part.__dict__["after"] = [following]


@feature(told=0, link=_link_next)  # sets an attribute of the block after it, which that one reads
def WritesToSibling(self: Any, x: Tensor) -> Any:
    y = self.linear(x).relu() if self.told else self.linear(x)
    for following in self.__dict__.get("after", ()):
        following.told = 1 - self.told
    return y


class Identity(Feature):  # goes another way where its id is that of a block noted before
    noted: int = 0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2) if id(self) == type(self).noted else self.linear(x + 1)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        type(parts[1]).noted = id(parts[1])


@feature  # goes another way by the function that calls it
def CallerBranch(self: Any, x: Tensor) -> Any:
    frame, depth = sys._getframe(), 0
    while frame is not None and depth < 40:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return self.linear(x) if depth else x


@branch(weak_input=None)  # keeps a weak reference to its input, and asks in the next call whether it lives
def WeakToInput(self: Any, x: Tensor) -> Any:
    lives = self.weak_input is not None and self.weak_input() is not None
    self.weak_input = weakref.ref(x)
    return lives


# makes a dropout in each call
NewDropout = feature(lambda self, x: nn.Dropout(0.1)(self.linear(x)))
# makes a layer with parameters in each call, which nothing holds after it
NewLinear = feature(lambda self, x: self.linear(x) + nn.Linear(WIDTH, WIDTH, device=x.device)(x.detach()))
# the dropout of odd blocks is in evaluation mode
EvalChild = feature(lambda self, x: self.dropout(self.linear(x)),
                    dropout=lambda at: nn.Dropout(0.1).train(not at.is_odd))
# goes another way in training, and where gradients are enabled
FlagBranch = branch(lambda self, x: self.training and torch.is_grad_enabled())
