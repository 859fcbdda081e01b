"""How many samples and tokens a step takes: those of all its micro-batches, where it accumulates gradients."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.record.log import Log, OuterCall
from analyzer.units import add_quantities


def list_micro_batches(log: Log, step: int) -> list[OuterCall]:
    """The call of the model of each micro-batch of a step, which says how many samples and tokens it takes.

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


def _last_before_each(calls: Sequence[OuterCall], backward: Sequence[int]) -> list[OuterCall]:
    """The last call before each backward pass, of which those without a call between them are one."""
    ends = [*(call.position for call in calls[1:]), None]
    return [call for call, end in zip(calls, ends)
            if any(call.position <= first and (end is None or first < end) for first in backward)]


def count_samples(log: Log, given: int | None) -> int | None:
    """The samples of the last step, ``given`` being those of its inputs: as many, unless it has micro-batches."""
    calls = list_micro_batches(log, log.steps - 1)
    return given if len(calls) < 2 else add_quantities([call.samples for call in calls])


def count_step_tokens(log: Log, given: int | None) -> int | None:
    """The tokens of the last step, likewise."""
    calls = list_micro_batches(log, log.steps - 1)
    return given if len(calls) < 2 else add_quantities([call.tokens for call in calls])
