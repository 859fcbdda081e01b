"""How many samples and tokens a step takes: those of all its micro-batches, where it accumulates gradients."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzer.record.log import Log, OuterCall
from analyzer.record.token_count import count_tokens
from analyzer.units import add_quantities

from .node_info import TensorInfo

_LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")


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


def count_step_tokens(log: Log, inputs: Mapping[str, TensorInfo]) -> int | None:
    """The tokens of the last step, likewise, of these inputs; None where those that could be are features."""
    features = list_features(log)
    given = count_tokens([(name, tensor) for name, tensor in inputs.items() if tensor.shape not in features])
    if given is None and features:
        return None
    calls = list_micro_batches(log, log.steps - 1)
    return given if len(calls) < 2 else add_quantities([call.tokens for call in calls])


def list_features(log: Log) -> set[tuple[int, ...]]:
    """The shapes of inputs of indices of which no position is a token's: they are looked up as bags, whose entries are
    summed up (`torch.nn.EmbeddingBag`), or column by column.
    """
    found: dict[tuple[int, ...], bool] = {}
    for step, call, storages, _ in log.tallies():
        name = getattr(getattr(call.signature.op, "_schema", None), "name", "")
        if step != log.steps - 1 or name not in _LOOKUPS:
            continue
        for number, index in zip(call.inputs[1:3], call.signature.inputs[1:3]):  # behind the table: indices, offsets
            spec: Any = storages[number].spec if number in storages else None
            if spec is not None:
                is_whole = name == _LOOKUPS[0] and (len(index.shape) > 1 or index.numel == spec.numel)
                found[tuple(spec.shape)] = found.get(tuple(spec.shape), False) or is_whole
    return {shape for shape, has_tokens in found.items() if not has_tokens}
