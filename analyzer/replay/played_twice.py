"""What ends a run in which a block should not have been played."""
from __future__ import annotations

from torch import nn


class PlayedTwice(BaseException):
    """A module that was played is called again, or its parameters are used outside of it: their gradients are sums,
    which a record does not tell.

    Not an Exception, so that no handler in the model's code takes it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.kind = type(module)
