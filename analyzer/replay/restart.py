"""What ends a run in which something should not have been replayed."""
from __future__ import annotations

from torch import nn

BLOCK = "<block>"  #: stands for the path of a block, and of the model around it, in what a trial says


class Restart(BaseException):
    """The run has to begin again, without replaying modules of the class ``kind``, or (None) without replaying at all.

    Not an Exception, so that no handler in the model's code takes it.
    """

    def __init__(self, reason: str, module: nn.Module | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = None if module is None else type(module)
