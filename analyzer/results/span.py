"""The steady step in time: a record for what the host or a stream does for one call."""
from __future__ import annotations

from typing import NamedTuple

from .moment import Moment


class SpanInfo(NamedTuple):
    """What one lane does for one operator call of the steady step, as `Profile.spans` lists them.

    >>> SpanInfo("compute", "kernel", "fc1", "aten.addmm.default", "fc1", "fc1", "forward", 0.5, 0.25).end_seconds
    0.75
    """

    #: "host"; "compute", the default stream; of another one what it communicates ("fsdp all_gather") or copies ("copy
    #: to host"), else its number ("stream 2")
    lane: str
    kind: str               #: "launch" or "wait" (for the device) of the host, else "kernel", "collective" or "copy"
    name: str               #: the node, or the operator of a call outside the nodes, or "synchronize"
    operator: str | None    #: "aten.addmm.default"; None where the program itself waits
    node: str | None        #: as in `Profile.nodes`
    module_path: str
    phase: str              #: forward, backward, optimizer or zero_grad
    start_seconds: Moment   #: from the beginning of the step
    seconds: float          #: of all kernels of the call, the gaps between them left out
    launch: int | None = None  #: of kernels: which of `Profile.spans` launched them

    @property
    def end_seconds(self) -> float:
        """When it ends, in seconds from the beginning of the step."""
        return self.start_seconds + self.seconds
