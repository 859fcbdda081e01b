"""What a forward pass for inference does otherwise because modules are in training mode."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_DRAWS = frozenset(["native_dropout", "_fused_dropout", "bernoulli", "bernoulli_"])


def depends_on_training(module: nn.Module) -> bool:
    """Whether the class of a module is known to do something else where its ``training`` is True.

    >>> [depends_on_training(m) for m in (nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2), nn.LayerNorm(2))]
    [True, False, True, False]
    """
    if isinstance(module, _NORMS):
        return module.running_mean is not None  # else statistics are those of the batch in both
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout)
    name = type(module).__name__
    # torchvision's StochasticDepth, timm's DropPath and DropBlock2d, the DropPath that many models of transformers have
    if isinstance(module, nn.modules.dropout._DropoutNd) or name == "StochasticDepth" or "DropPath" in name or (
            "DropBlock" in name):
        return bool(getattr(module, "p", getattr(module, "drop_prob", None)))
    return isinstance(module, nn.RReLU)


def describe_training(walked: Iterable[tuple[str, nn.Module]], log: Log) -> str | None:
    """A sentence on what ran as in training in an inference step, None where nothing is known to; ``walked`` are (path,
    module) pairs.
    """
    training = [(path, module) for path, module in walked if module.training]
    if not training:
        return None
    found = [(path, type(module).__name__) for path, module in training if depends_on_training(module)]
    draws = sum(number for step, call, _, number in log.tallies() if step == log.steps - 1 and draws_mask(call))
    counts = [f"{number} {name}" for name, number in Counter(name for _, name in found).items()]
    counts += [f"{draws} random {'mask' if draws == 1 else 'masks'}"] if draws else []
    if not counts:
        return None
    first = f", the first module {found[0][0] or 'the model'!r}" if found else ""
    return (f"modules are in training mode, which mode='infer' leaves as it is: {', '.join(counts)} would not be the "
            f"same after model.eval(){first}; eval=True profiles as after it")


def draws_mask(call: OpCall) -> bool:
    """Whether a call draws at random what dropout or stochastic depth leave out."""
    op = call.signature.op
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    if schema.name.partition("::")[2] in _DRAWS:
        return True
    for at, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":  # of fused attention
            return at < len(call.signature.args) and bool(call.signature.args[at])
    return False
