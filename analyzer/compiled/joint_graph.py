"""The joint graph of a compiled function: its forward and backward operators as one functional ``torch.fx`` graph."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import TensorSpec

from .traced_tensor import GraphShape

Tensor = torch.Tensor


@dataclass
class JointGraph:
    """A functional graph of ``primals`` and ``tangents``, whose outputs are results, then gradients of the primals.

    Primals that the function writes to are written by a last ``copy_``, as AOTAutograd lets the graph do it
    (``keep_input_mutations``). ``modules`` tells of each node the index of the module that ran, ``forward_of`` of each
    the place of the forward operator whose gradient it is a part of: its own where it is of the forward pass, None
    where it is of none. Nodes have their places among all as ``meta["place"]``, and what they give as ``meta["spec"]``.
    """

    graph: fx.Graph
    primals: list[Tensor]
    given: int                 #: how many primals are arguments; others are parameters, buffers, tensors of closures
    results: int               #: how many outputs belong to the forward pass
    differentiated: list[int]  #: results whose gradients are the tangents
    modules: list[int]
    forward_of: list[int | None]
    inputs: list[Tensor]       #: what may get a gradient: primals, and tensors around others
    shape: GraphShape
    fake_mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    @cached_property
    def module(self) -> fx.GraphModule:
        """What torch's compiler takes: the graph, whose nodes have fake tensors as ``meta["val"]``."""
        with without_modes():
            for node in self.graph.nodes:
                if "spec" in node.meta:
                    node.meta["val"] = fakes_of(node.meta["spec"], self.fake_mode)
        return fx.GraphModule(nn.Module(), self.graph)


def fakes_of(specs: Any, mode: FakeTensorMode) -> Any:
    """Tensors of torch's own compiler, on the devices that the specs claim, in place of these."""
    if isinstance(specs, TensorSpec):
        plain = torch.empty_strided(specs, specs.stride, dtype=specs.dtype, device="meta")
        return FakeTensor(mode, plain, torch.device(specs.device))
    return type(specs)([fakes_of(one, mode) for one in specs]) if isinstance(specs, (list, tuple)) else specs


def put_writes_last(graph: fx.Graph) -> None:
    """Writes to primals are behind the backward pass, as in AOTAutograd's graphs: passes that find equal operators
    (``fx_graph_cse`` of ``torch/_functorch/compile_utils.py``) join none on two sides of a write.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        graph._root.prev.append(node)


_PLAIN = frozenset({type(None), str, int, torch.dtype})
Labels = dict[fx.Node, tuple[Hashable, list[fx.Node]]]


def label_nodes(graph: fx.Graph) -> Labels:
    """Of each node what it is without the nodes that it reads, and those in order."""
    return {node: _label_of(node) for node in graph.nodes}


def _label_of(node: fx.Node) -> tuple[Hashable, list[fx.Node]]:
    inputs: list[fx.Node] = []

    def flat(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            inputs.append(value)
            return fx.Node
        if isinstance(value, (list, tuple)):
            return tuple([flat(v) for v in value])
        if isinstance(value, dict):
            return tuple([(k, flat(v)) for k, v in value.items()])
        # 1.0 and True are equal to 1
        return value if type(value) in _PLAIN else (type(value), repr(value))

    return (node.op == "call_function" and node.target, flat(node.args), flat(node.kwargs) if node.kwargs else (),
            _flat_specs(node.meta.get("spec")), str(node.meta.get("recompute"))), inputs


def _flat_specs(specs: Any) -> Hashable:
    """What there is to tell one result of an operator from another."""
    if isinstance(specs, TensorSpec):  # equal ones are one object, whose own equality is that of shapes
        return id(specs)
    return tuple([_flat_specs(one) for one in specs]) if isinstance(specs, (list, tuple)) else None
