"""One call of an operator, as the log keeps it."""
from __future__ import annotations

from dataclasses import dataclass

from analyzer.meta.signature import Signature


@dataclass(slots=True, eq=False, repr=False)
class OpCall:
    """One operator call: what, on which storages (by their ids in `Log.storages`), when and for whom."""

    signature: Signature
    inputs: tuple[int, ...]   #: storage id of each tensor in signature.inputs
    outputs: tuple[int, ...]  #: storage id of each tensor in signature.outputs
    step: int                 #: training step, 0 is the first
    phase: str                #: "forward", "backward", "optimizer" or "zero_grad"
    module: int               #: index in Log.modules
    node: int                 #: index in Log.nodes (an fx node, or in eager runs a unit of the module's own)
    #: index in Log.calls of the forward call whose gradient this one computes; None where autograd does not tell
    forward: int | None
    recomputed: bool          #: a forward operator run again in backward (activation checkpointing)

    def __repr__(self) -> str:
        return f"<{self.phase} {self.signature!r}>"
