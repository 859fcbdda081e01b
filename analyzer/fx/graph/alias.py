"""What a node of a graph does besides giving its result: writes, and memory that it shares."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from analyzer.fx.trace.function_call import EFFECTS, IN_PLACE_OF, CallTarget, is_functional

_IN_PLACE = set(IN_PLACE_OF.values())
#: Not views by their schema, or no operators of ATen; they can give their argument back as it is.
_PASS_THROUGH = frozenset(
    """dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d type_as float double
    half bfloat16 int long bool cpu cuda type atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid einsum pad
    getitem getattr identity conj resolve_conj resolve_neg requires_grad_ clip_grad_norm_""".split())
_NORMALIZATIONS = frozenset(
    {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that ``node`` changes in place (buffers of a module that it calls are not values)."""
    out = node.kwargs.get("out")
    written: list[Any] = [out] if out is not None else []
    name = _name(node)
    if node.op == "call_module":
        if getattr(_module(node), "inplace", False) is True:
            written.extend(node.args[:1])
    elif node.op in ("call_method", "call_function"):
        if node.target in _IN_PLACE or name in ("setitem", "setattr", "assign_buffer") or _is_inplace_call(node):
            written.extend(node.args[:1])
        elif name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            written.extend(node.args[:1] if not name.startswith("_foreach") else node.args)
        elif name.partition(".")[0] in _NORMALIZATIONS:
            written.extend(_statistics(node))
        elif name in ("embedding", "embedding_bag") and node.kwargs.get("max_norm") is not None:
            written.extend(node.args[1:2])
        written.extend(_shared(node, writes=True))
    return list(dict.fromkeys(_nodes_in(written)))


def may_share(node: fx.Node) -> list[fx.Node]:
    """The inputs of ``node`` whose memory its result may share; what is not known to be new is assumed to share it."""
    if node.op == "call_module":
        module = _module(node)
        # whether its result is memory of its own, which is known of those of torch.nn
        makes_new = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(
            module, (nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten))
        if isinstance(module, nn.modules.dropout._DropoutNd):
            makes_new = module.training and module.p > 0
        return written_by(node) if makes_new else list(node.all_input_nodes)
    if node.op not in ("call_method", "call_function"):
        return []
    name = _name(node)
    schemas = _schemas(node)
    if name in _PASS_THROUGH:
        return list(node.all_input_nodes)
    if not schemas:
        owner = str(getattr(node.target, "__module__", "")).partition(".")[0]
        known = not isinstance(node.target, CallTarget) and owner in ("torch", "_operator")
        return written_by(node) if known else list(node.all_input_nodes)
    return list(dict.fromkeys([*_nodes_in(list(_shared(node, writes=False))), *written_by(node)]))


def makers(node: fx.Node) -> set[fx.Node]:
    """The nodes that may have made the memory of ``node``'s result, itself included."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        n = pending.pop()
        if n not in found:
            found.add(n)
            pending.extend(may_share(n))
    return found


def _statistics(node: fx.Node) -> list[Any]:
    affine, running = ("weight", "bias"), ("running_mean", "running_var")
    order = (*running, *affine) if is_functional(node.target) else (*affine, *running)
    given = dict(zip(("input", *order, "training"), node.args)) | node.kwargs
    updates = given.get("training", given.get("use_input_stats"))
    return [given.get(name) for name in running] if updates else []


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _module(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return None if owner is None else owner.get_submodule(str(node.target))


def _is_inplace_call(node: fx.Node) -> bool:
    if node.kwargs.get("inplace") is True:
        return True
    if node.op != "call_function" or not inspect.isfunction(
            node.target) or node.target.__module__ != "torch.nn.functional":
        return False
    names = list(inspect.signature(node.target).parameters)
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return at < len(node.args) and node.args[at] is True


def _schemas(node: fx.Node) -> list[_Schema]:
    """Those of the operators that the node may call; overloads share their aliases except for ``out``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return [*_read_schemas(target)]
    is_torchs = str(getattr(target, "__module__", None) or "torch").startswith("torch")  # builtins name no module
    if isinstance(target, (torch._ops.OpOverloadPacket, CallTarget)) or node.op == "call_function" and not is_torchs:
        return []
    return [schema for schema in _read_schemas(_name(node)) if len(node.args) <= schema[0]]


_Schema = tuple[int, tuple[tuple[int, str, bool], ...]]


@functools.cache
def _read_schemas(operator: Any) -> tuple[_Schema, ...]:
    """Of an operator, or all of a name but for ``out``: how many arguments, and which of them share their memory."""
    packet = getattr(torch.ops.aten, operator, None) if operator and isinstance(operator, str) else None
    schemas = [] if packet is None else [getattr(packet, o)._schema for o in packet.overloads()]
    schemas = [s for s in schemas if not any(a.is_out for a in s.arguments)]
    if isinstance(operator, torch._ops.OpOverload):
        schemas = [operator._schema]
    return tuple((len(s.arguments), tuple((i, a.name, a.alias_info.is_write) for i, a in enumerate(s.arguments)
                                          if a.alias_info is not None)) for s in schemas)


def _shared(node: fx.Node, writes: bool) -> Iterator[Any]:
    """The arguments of a call whose memory it shares, or only those that it writes to."""
    for _, shared in _schemas(node):
        for i, name, is_written in shared:
            if is_written or not writes:
                yield node.args[i] if i < len(node.args) else node.kwargs.get(name)


def _nodes_in(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return found


_RANDOM = ("rand", "bernoulli", "multinomial", "dropout", "rrelu", "scaled_dot_product_attention",
           "multi_head_attention", "gumbel_softmax", "fractional_max_pool")


def is_pure(node: fx.Node) -> bool:
    """Whether all that ``node`` does is give its result."""
    if node.op == "get_attr":
        return True
    if node.op in ("placeholder", "output") or written_by(node):
        return False
    if node.op == "call_module":
        called: Any = _module(node)
        if not type(called).__module__.startswith(
                "torch.nn.modules.") or called._forward_hooks or called._forward_pre_hooks:
            return False
        return not called.training or not (list(called.buffers()) or any(
            r in type(called).__name__.lower() for r in (*_RANDOM, "attention", "rnn", "lstm", "gru", "transformer")))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    module = "torch" if node.op == "call_method" or inspect.isbuiltin(node.target) else str(
        getattr(node.target, "__module__", None) or "torch")
    ours = module.split(".")[0] in ("torch", "_operator") and not module.startswith("torch.distributed")
    return ours and name not in EFFECTS and not isinstance(node.target, CallTarget) and not any(
        r in name for r in _RANDOM) and not _draws(name) and "c10d" not in str(node.target)


@functools.cache
def _draws(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.partition(".")[0], None) if name else None
    return packet is not None and any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags
                                      for o in packet.overloads())
