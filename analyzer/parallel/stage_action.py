"""What a rank of a pipeline did when, and what its step was spent on."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageAction:
    """An action of a rank with its time: seconds since the step began.

    ``kind``, ``stage`` and ``micro_batch`` as in `PipelineAction`; ``peer`` is the rank at the other end of a transfer.
    A transfer begins when both ends are there.
    """

    rank: int
    kind: str
    stage: int
    micro_batch: int | None
    start: float
    end: float
    peer: int | None = None


@dataclass(frozen=True)
class RankTime:
    """What a rank's step is spent on; ``compute``, ``optimizer``, ``exposed`` ones and ``bubble`` add up to the step.

    - ``compute_seconds``: forward and backward passes; ``optimizer_seconds``: the update.
    - ``exposed_transfer_seconds``: computes nothing as a transfer that it needs is under way.
    - ``exposed_group_seconds``: the same for collectives: gradients, parameters, what stages share.
    - ``bubble_seconds``: has nothing to do, as other ranks compute.
    - ``warmup_seconds``: until its first backward pass begins.
    """

    rank: int
    stages: tuple[int, ...]
    compute_seconds: float
    optimizer_seconds: float
    exposed_transfer_seconds: float
    exposed_group_seconds: float
    bubble_seconds: float
    warmup_seconds: float
