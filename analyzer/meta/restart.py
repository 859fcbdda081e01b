"""What ends a run in which something was replayed that should not have been."""
from __future__ import annotations

from torch import nn


class Restart(BaseException):
    """The run has to begin again with less replayed: no module of the class of ``module``, or nothing at all (None).

    No Exception, so that no handler in the model's code takes it.
    """

    def __init__(self, reason: str, module: nn.Module | None = None) -> None:
        super().__init__(reason)
        self.reason, self.module = reason, module
