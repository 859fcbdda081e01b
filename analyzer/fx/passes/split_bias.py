"""Biases of a traced graph added by nodes of their own."""
from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from analyzer.errors import InputError
from analyzer.fx.graph.statement import AutocastRegion
from analyzer.fx.trace.tracer import symbolic_trace
from analyzer.fx.trace.tracer_impl import register_bias_split, splits


def split_biases(gm: fx.GraphModule) -> None:
    """What ``symbolic_trace(..., bias_addition_split=True)`` does, for a graph that is annotated: see
    `register_bias_split`.

    Each layer and function with a bias is traced again and replaced by its nodes, in the same regions.

    Raises InputError for a node whose inputs have no ``meta["info"]`` (call symbolic_profile first).

    >>> from analyzer import symbolic_profile
    >>> x = torch.empty(2, 4)
    >>> gm = symbolic_profile(symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), meta_args={"input": x}), x)
    >>> split_biases(gm)
    >>> [n.name for n in gm.graph.nodes]
    ['input_1', '_0_weight', 'linear', '_0_bias', 'add', '_1', 'output']
    """
    known = {n: n.meta["info"].outputs for n in gm.graph.nodes if "info" in n.meta}
    for node in list(gm.graph.nodes):
        if _has_bias(gm, node):
            result = _inline(gm, node, _trace(gm, node, known))
            known[result] = known.pop(node, ())
    gm.recompile()


def _has_bias(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return splits(gm.get_submodule(str(node.target)))
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None) in register_bias_split
    if node.op != "call_function" or node.target not in register_bias_split:
        return False
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    return bias is not None or node.target in (torch.addmm, torch.baddbmm)


class _Call(nn.Module):
    """A node as a module of its tensors; ``layer`` is the module that it calls, if any."""

    def __init__(self, node: fx.Node, layer: nn.Module | None) -> None:
        super().__init__()
        self.layer, self._node = layer, [node]
        regions = node.meta.get("region") or ()
        self._casts = [r for r in regions if isinstance(r, AutocastRegion)]

    def forward(self, *tensors: Any) -> Any:
        node = self._node[0]
        values = dict(zip(node.all_input_nodes, tensors))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        with ExitStack() as stack:
            for region in self._casts:
                stack.enter_context(region.context())
            if self.layer is not None:
                return self.layer(*args, **kwargs)
            function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            return function(*args, **kwargs)


def _trace(gm: fx.GraphModule, node: fx.Node, known: dict[fx.Node, tuple[Any, ...]]) -> fx.Graph:
    tensors = []
    for i in node.all_input_nodes:
        if len(known.get(i, ())) != 1:
            raise InputError(
                f"split_biases(): nothing is known of {i.name}, which {node.name} reads; call symbolic_profile first")
        tensors.append(torch.empty(known[i][0].shape, dtype=getattr(torch, known[i][0].dtype), device="meta"))
    layer = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    return symbolic_trace(_Call(node, layer), meta_args={"tensors": tuple(tensors)}, bias_addition_split=True).graph


def _inline(gm: fx.GraphModule, node: fx.Node, part: fx.Graph) -> fx.Node:
    """Put the nodes of ``part`` in the place of ``node``; the one that gives its result."""
    env: dict[fx.Node, fx.Node] = {}
    meta = {k: v for k, v in node.meta.items() if k != "info"}
    with gm.graph.inserting_before(node):
        for n in part.nodes:
            if n.op == "placeholder":
                continue
            if n.op == "output":
                result = env[n.args[0]]
            elif n.target is operator.getitem and isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder":
                env[n] = node.all_input_nodes[int(n.args[1])]
            else:
                if n.op == "get_attr":
                    env[n] = gm.graph.get_attr(str(node.target) + str(n.target).removeprefix("layer"))
                else:
                    env[n] = gm.graph.node_copy(n, env.__getitem__)
                env[n].meta = dict(meta)
    node.replace_all_uses_with(result)
    gm.graph.erase_node(node)
    return result
