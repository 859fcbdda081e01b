"""What hears of a run while it is recorded, besides the log."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from analyzer.meta.state import StreamAction


class RunListener:
    """Is told of a run that is recorded, each time behind what the log says of it; `ordered`, `step_begins` and
    `module_entered` come before. Stands in `RecordedRun.listeners` as long as it listens, and overrides what it wants
    to hear of.
    """

    def step_begins(self, step: int) -> None:
        """The step before has ended."""

    def module_entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""

    def leaf_met(self, variable: torch.Tensor) -> None:
        """A gradient is accumulated into a leaf that no module of the log holds."""

    def module_left(self, module: torch.nn.Module, result: Any) -> None:
        """A module's call ended with ``result``."""

    def backward_ended(self) -> None:
        """A backward pass that is inside no other ended."""

    def kept(self, number: int) -> None:
        """A library keeps a workspace, of that number in the log."""

    def gave_back(self) -> None:
        """A library gives back a workspace that it kept."""

    def ordered(self, action: StreamAction, stream: int, event: int) -> None:
        """The program orders streams, or waits for the device."""
