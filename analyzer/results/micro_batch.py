"""How many samples a step takes: those of all its micro-batches, where it accumulates gradients."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.record.log import Log, OuterCall


def list_micro_batches(log: Log, step: int) -> list[int | None]:
    """The samples of each micro-batch of a step, None where not known.

    A micro-batch is a forward pass of the model with a backward pass of its own. Calls that one backward pass is for
    (two views of a batch) are one; of several models (a GAN) the one that had fewest counts, for the others run more
    than once on a batch. Empty where the step was replayed from another or no model was called.
    """
    backward = [record.first_call for record in log.phases if record.step == step and record.phase == "backward"]
    by_module: dict[int, list[OuterCall]] = {}
    for call in log.outer_calls:
        if call.step == step:
            by_module.setdefault(call.module, []).append(call)
    found = [_last_before_each(calls, backward) for calls in by_module.values()]
    return min((passes for passes in found if passes), key=len, default=[])


def _last_before_each(calls: Sequence[OuterCall], backward: Sequence[int]) -> list[int | None]:
    """The samples of the last call before each backward pass, of which those without a call between them are one."""
    ends = [*(call.position for call in calls[1:]), None]
    return [call.samples for call, end in zip(calls, ends)
            if any(call.position <= first and (end is None or first < end) for first in backward)]


def count_samples(log: Log, given: int | None) -> int | None:
    """The samples of the last step, ``given`` being those of its inputs: as many, unless it has micro-batches."""
    samples = list_micro_batches(log, log.steps - 1)
    if len(samples) < 2:
        return given
    known = [n for n in samples if n is not None]
    return sum(known) if len(known) == len(samples) else None
