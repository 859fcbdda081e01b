"""What the parts of a recorder share: where the run is that they write down, and who else hears of it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .log import Log
from .storage_lifetime import OUTSIDE, Event

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

    def backward_begins(self) -> None:
        """A backward pass begins that is inside no other."""

    def backward_ended(self) -> None:
        """A backward pass that is inside no other ended."""

    def kept(self, number: int) -> None:
        """A library keeps a workspace, of that number in the log."""

    def gave_back(self) -> None:
        """A library gives back a workspace that it kept."""

    def ordered(self, action: StreamAction, stream: int, event: int) -> None:
        """The program orders streams, or waits for the device."""


@dataclass(eq=False, slots=True)
class RecordedRun:
    """A run that is being written down: the step and the phase that it is in, the modules and the node that run."""

    log: Log
    step: int = 0
    phase: str = "forward"
    node: int = OUTSIDE
    stack: list[int] = field(default_factory=list)  #: the modules that run, indices in `Log.modules`, innermost last
    events: list[Event] | None = None  #: collected while a step is to be replayed
    #: bytes of workspaces that libraries keep on other devices that share the run, by number and the device's name
    kept_elsewhere: dict[int, Mapping[str, int]] = field(default_factory=dict)
    listeners: list[RunListener] = field(default_factory=list)  #: what else hears of the run
