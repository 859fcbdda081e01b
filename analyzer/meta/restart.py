"""What ends a run in which something was replayed, or left unmaterialized, that should not have been."""
from __future__ import annotations

from torch import nn


class Restart(BaseException):
    """The run has to begin again with less replayed: no module of the class of ``module``, or nothing at all (None).

    Where the run only looked at tensors that are not materialized yet (``is_touched``), it begins with all of them.
    No Exception, so that no handler in the model's code takes it.
    """

    def __init__(self, reason: str, module: nn.Module | None = None, is_touched: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.module, self.is_touched = reason, module, is_touched


def touched(module: nn.Module) -> Restart:
    """What to raise where code uses a tensor of a lazily materialized block."""
    return Restart("its parameters are used outside of it", module, is_touched=True)
