"""What a training step took, for plans: peaks, FLOPs, seconds, and its memory call by call."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SavedBytes(NamedTuple):
    """What a node made that is kept for backward."""

    node: str
    module_path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on the device while the operator calls of a step run, in their order; all lists are as long.

    Of very many calls the highest of neighbours stand for them, those with most activations and with most of all.
    """

    activation_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]    #: parameters, their gradients, buffers, inputs, workspaces
    nodes: tuple[str, ...]          #: whose call it is
    forward_points: int             #: so many are of the forward pass, the others of backward
    saved: tuple[SavedBytes, ...]   #: by the nodes that made it, where it is any

    def curve(self, of_step: bool, held_bytes: int = 0) -> list[int]:
        """Activations call by call; of the whole step, everything and what is held besides.

        >>> StepMemory((1, 3), (5, 6), ("fc", "fc"), 1, ()).curve(of_step=True, held_bytes=10)
        [16, 19]
        """
        if not of_step:
            return list(self.activation_bytes)
        return [held_bytes + a + b for a, b in zip(self.activation_bytes, self.other_bytes)]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a training step took. *Activations* are neither there before the step nor gradients of parameters."""

    peak_activation_bytes: int
    peak_bytes: int                 #: of the forward and backward pass, parameters and gradients included
    fwd_flops: int | None = None
    bwd_flops: int | None = None
    recompute_flops: int | None = None
    seconds: float | None = None    #: forward and backward, where a device was given
    memory: StepMemory | None = None

    def peak_with_optimizer(self, held_bytes: int, update_bytes: int) -> int:
        """The peak of the whole training step, with an optimizer that holds so much and takes so much to update.

        >>> StepInfo(10, 40).peak_with_optimizer(20, 50)
        60
        """
        return max(self.peak_bytes + held_bytes, update_bytes)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget, and the plan found for it."""

    budget_bytes: int
    peak_bytes: int
    overhead: float | None              #: in units of the plan's objective
    recompute_flops: int | None
