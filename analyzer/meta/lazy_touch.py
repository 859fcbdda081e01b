"""What ends a run in which a tensor that is not materialized yet was looked at."""
from __future__ import annotations

from torch import nn


class LazyTouch(BaseException):
    """Code used a tensor of a lazily materialized block. No Exception: no handler in the model's code takes it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(type(block).__name__)
        self.block = block
