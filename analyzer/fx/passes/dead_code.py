"""Takes away what nobody reads."""
from __future__ import annotations

import functools
import inspect

import torch
from torch import fx, nn

from analyzer.fx.graph.alias import written_by
from analyzer.fx.trace.call_target import CallTarget

_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "rrelu", "scaled_dot_product_attention",
           "multi_head_attention")


def eliminate_dead_code(gm: fx.GraphModule) -> None:
    """Erase nodes whose results are not read and that do nothing else; regions and annotations of the others stay.

    Unlike `torch.fx.Graph.eliminate_dead_code` it leaves what writes in place, draws random numbers (those drawn later
    would change), updates buffers or communicates, and functions and modules that are not PyTorch's own, of which
    nobody can tell.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> def f(x):
    ...     x.sin().exp()
    ...     y = x.cos()
    ...     y.add_(1)
    ...     return y
    >>> gm = symbolic_trace(f, meta_args={"x": torch.empty(2)})
    >>> eliminate_dead_code(gm)
    >>> [n.name for n in gm.graph.nodes]
    ['x', 'cos', 'add_', 'output']
    """
    for node in reversed(gm.graph.nodes):
        if not node.users and is_pure(node):
            gm.graph.erase_node(node)
    gm.recompile()


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
    return ours and not isinstance(node.target, CallTarget) and not any(
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
    return not module.training or not (list(module.buffers())
                                       or any(r in type(module).__name__.lower()
                                              for r in (*_RANDOM, "attention", "rnn", "lstm", "gru", "transformer")))
