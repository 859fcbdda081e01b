"""One call of an operator, as the log keeps it."""
from __future__ import annotations

from analyzer.meta.signature import Signature


class OpCall:
    """One operator call: what (``signature``), on which storages, when and for whom.

    Storage ids index `Log.storages`. ``forward`` is the index in `Log.calls` of the forward call whose
    gradient this call computes (None outside backward or where autograd does not tell).
    """

    __slots__ = ("signature", "inputs", "outputs", "step", "phase", "module", "node", "forward", "recomputed")

    def __init__(self, signature: Signature, inputs: tuple[int, ...], outputs: tuple[int, ...], step: int, phase: str,
                 module: int, node: int, forward: int | None, recomputed: bool) -> None:
        self.signature = signature
        self.inputs = inputs          #: storage id of each tensor in signature.inputs
        self.outputs = outputs        #: storage id of each tensor in signature.outputs
        self.step = step              #: training step, 0 is the first
        self.phase = phase            #: "forward", "backward", "optimizer" or "zero_grad"
        self.module = module          #: index in Log.modules
        self.node = node              #: index in Log.nodes (an fx node, or in eager runs a unit of the module's own)
        self.forward = forward
        self.recomputed = recomputed  #: a forward operator run again in backward (activation checkpointing)

    def __repr__(self) -> str:
        return f"<{self.phase} {self.signature!r}>"
