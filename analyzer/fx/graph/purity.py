"""Whether a node does anything besides giving its result."""
from __future__ import annotations

import functools
import inspect

import torch
from torch import fx, nn

from analyzer.fx.trace.call_target import CallTarget
from analyzer.fx.trace.function_call import EFFECTS

from .alias import written_by

_RANDOM = ("rand", "bernoulli", "multinomial", "dropout", "rrelu", "scaled_dot_product_attention",
           "multi_head_attention", "gumbel_softmax", "fractional_max_pool")


def is_pure(node: fx.Node) -> bool:
    """Whether all that ``node`` does is give its result."""
    if node.op == "get_attr":
        return True
    if node.op in ("placeholder", "output") or written_by(node):
        return False
    if node.op == "call_module":
        owner = node.graph.owning_module
        return owner is not None and _is_pure_module(owner.get_submodule(str(node.target)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    module = "torch" if node.op == "call_method" or inspect.isbuiltin(node.target) else str(
        getattr(node.target, "__module__", None) or "torch")
    ours = module.split(".")[0] in ("torch", "_operator") and not module.startswith("torch.distributed")
    return ours and name not in EFFECTS and not isinstance(node.target, CallTarget) and not any(
        r in name for r in _RANDOM) and not _draws(name) and "c10d" not in str(node.target)


@functools.cache
def _draws(name: str) -> bool:
    """Whether an operator of ATen says that it draws random numbers."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None) if name else None
    return packet is not None and any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags
                                      for o in packet.overloads())


def _is_pure_module(module: nn.Module) -> bool:
    if not type(module).__module__.startswith(
            "torch.nn.modules.") or module._forward_hooks or module._forward_pre_hooks:
        return False
    return not module.training or not (list(module.buffers()) or any(
        r in type(module).__name__.lower() for r in (*_RANDOM, "attention", "rnn", "lstm", "gru", "transformer")))
