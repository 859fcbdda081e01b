"""What every feature of a random program is: part of a block, made for the block's place among the others."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

WIDTH = 16


@dataclass(frozen=True)
class Place:
    """Which of how many blocks is built."""

    index: int
    count: int

    @property
    def is_odd(self) -> bool:  # whether the index is odd: the usual way in which the features of two blocks differ
        return self.index % 2 == 1


class Feature(nn.Module):
    """Part of a block: `build` makes what it holds, `forward` computes with it. Here a linear layer.

    A block may be one feature, hold several as children, or inherit from several: so `build` and `forward` use nothing
    of ``self`` but what they make.
    """

    if TYPE_CHECKING:  # what `build` makes may be anything

        def __getattr__(self, name: str) -> Any: ...

    linear: Any

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.build(place)

    def build(self, place: Place) -> None:
        """Make the modules, parameters and other attributes of the block at ``place``."""
        self.linear = linear()

    def forward(self, x: Tensor) -> Any:
        """What the feature computes from a tensor of ``(batch, length, WIDTH)``, of the same shape."""
        return self.linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        """Connect the feature's ``parts``, one of each block, once the whole ``model`` exists."""


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


def feature(forward: Callable[..., Any] | None = None, *, alone: bool = False,
            also: Callable[[Any, Place], object] | None = None,
            link: Callable[[Any, Sequence[Any]], object] | None = None, **made: Any) -> Callable[..., Any]:
    """The feature with a forward pass; a decorator where none is given. Its name is that of the variable it stands in.

    Beside the linear layer, or without one where that is ``alone``, a block holds what is ``made``: values, or
    functions that make them for a place. ``also`` is done to it then.
    """
    if forward is None:
        return partial(feature, alone=alone, also=also, link=link, **made)

    def build(self: Any, place: Place) -> None:
        if not alone:
            super(kind, self).build(place)
        for name, make in made.items():
            setattr(self, name, make(place) if callable(make) else make)
        if also is not None:
            also(self, place)

    methods = {"forward": forward, "build": build, "__module__": forward.__module__}
    kind: Any = type("Feature", (Feature,), methods | ({} if link is None else {"link": staticmethod(link)}))
    return kind  # type: ignore[no-any-return]


def branch(is_other_way: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """A feature that goes another way where a function of itself and its input says so; else as `feature`."""
    if is_other_way is None:
        return partial(branch, **options)
    asks = is_other_way

    def forward(self: Any, x: Tensor) -> Any:
        return self.linear(x).relu() if asks(self, x) else self.linear(x)

    forward.__module__ = asks.__module__
    return feature(forward, **options)
