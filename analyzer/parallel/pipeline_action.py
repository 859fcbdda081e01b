"""What a rank of a pipeline does, in its order: computations, sends and receives, gradient exchange, optimizer."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Kinds of work that occupy the rank's compute stream, in the words of torch.distributed.pipelining.
COMPUTE_KINDS = ("forward", "backward", "backward_input", "backward_weight", "optimizer")
#: Kinds that move data: the first four between two stages, the others within a stage's own process groups.
TRANSFER_KINDS = ("send_forward", "recv_forward", "send_backward", "recv_backward")
GROUP_KINDS = ("unshard", "reduce_grad", "shared")
BACKWARD_KINDS = ("backward", "backward_input")


class PipelineAction(NamedTuple):
    """One entry of a rank's list.

    - ``kind``: one of `COMPUTE_KINDS`, `TRANSFER_KINDS` or `GROUP_KINDS`; ``"shared"`` is a collective that ranks of
      several stages call together, all under one ``name``.
    - ``stage``, ``micro_batch``: which stage and micro-batch it is of; the micro-batch is None where there is none. A
      send names the stage that sends, a receive the stage that receives.
    - ``batch``: transfers next to one another with the same number start together (``batch_isend_irecv``).
    - ``waits``: whether the compute stream waits for the transfer at once; otherwise what needs the data waits.

    >>> PipelineAction("forward", 2, 5)
    2F5
    """

    kind: str
    stage: int
    micro_batch: int | None = None
    batch: int | None = None
    waits: bool = False
    name: str = ""

    def __repr__(self) -> str:
        short = _SHORT.get(self.kind, self.name or self.kind.upper())
        return f"{self.stage}{short}{'' if self.micro_batch is None else self.micro_batch}"


_SHORT = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "send_forward": "SEND_F",
          "recv_forward": "RECV_F", "send_backward": "SEND_B", "recv_backward": "RECV_B"}

#: The lists of all ranks of one pipeline, in the order of ranks.
ActionLists = Sequence[Sequence[PipelineAction]]


def place_stages(lists: ActionLists) -> dict[int, int]:
    """The rank that each stage runs on.

    >>> place_stages([[PipelineAction("forward", 0, 0)], [PipelineAction("forward", 1, 0)]])
    {0: 0, 1: 1}
    """
    return {action.stage: rank for rank, actions in enumerate(lists) for action in actions
            if action.kind in COMPUTE_KINDS and action.kind != "optimizer"}


def peer_of(action: PipelineAction, ranks: Mapping[int, int]) -> int:
    """The rank at the other end of a transfer, of the ranks of stages."""
    towards_next = action.kind in ("send_forward", "recv_backward")
    return ranks[action.stage + (1 if towards_next else -1)]


def message_of(action: PipelineAction) -> tuple[str, int, int | None]:
    """What a send and its receive have in common: how it is sent, by which stage, of which micro-batch.

    >>> message_of(PipelineAction("send_forward", 0, 3)) == message_of(PipelineAction("recv_forward", 1, 3))
    True
    """
    sends = action.kind.replace("recv", "send")
    if sends == action.kind:
        return sends, action.stage, action.micro_batch
    return sends, action.stage + (-1 if sends == "send_forward" else 1), action.micro_batch
