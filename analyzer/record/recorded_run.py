"""What the parts of a recorder share: where the run is that they write down, and who else hears of it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .log import Log
from .run_listener import RunListener
from .storage_lifetime import OUTSIDE, Event


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
