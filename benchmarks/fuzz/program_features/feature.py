"""What every feature of a random program is: part of a block, made for the block's place among the others."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        """What the feature computes from a tensor of ``(batch, length, WIDTH)``, of the same shape."""
        return self.linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        """Connect the feature's ``parts``, one of each block, once the whole ``model`` exists."""
