"""A traced graph against the module that it was traced from, on real tensors: results, gradients, buffers, and node by
node the layouts and aliases that are told of it.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from analyzer import symbolic_trace
from analyzer.fx import GraphInterpreter, GraphModule, ShapeProp

from .draw import TensorProgram
from .observe import find_loss


def trace(program: TensorProgram) -> GraphModule:
    """The graph of a program, with its checkpoints: without them a write to what one gave would be another."""
    model, args = program.build()
    named = {f"x{index}": value for index, value in enumerate(args)}
    return symbolic_trace(model, meta_args=named, trace_act_ckpt=True)


def run(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """What a step leaves: results, gradients of parameters and inputs, buffers."""
    torch.manual_seed(7)
    output = model(*args)
    results = [t for t in tree_leaves(vars(output) if hasattr(output, "left") else output) if isinstance(t, Tensor)]
    loss = find_loss(output)
    if loss is not None:
        loss.backward()
    return {**{f"result {index}": t for index, t in enumerate(results)},
            **{f"gradient of {name}": p.grad for name, p in model.named_parameters()},
            **{f"gradient of input {i}": a.grad for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_leaf},
            **{f"buffer {name}": b for name, b in model.named_buffers()}}


def compare_values(program: TensorProgram, graph: GraphModule) -> Iterator[str]:
    """What a graph computes otherwise than its module. It has no parameters and buffers that are not used."""
    before = {f"buffer {name}": b.clone() for name, b in program.build()[0].named_buffers()}
    expected, found = run(*program.build()), run(graph, program.build()[1])
    for name in [*expected, *(other for other in found if other not in expected)]:
        one, other = expected.get(name), found.get(name, before.get(name))
        if one is None or other is None:
            if one is not other:
                yield f"{name}: {one}, the graph gives {other}"
        elif (one.shape, one.stride(), one.dtype, one.requires_grad) != (
                other.shape, other.stride(), other.dtype, other.requires_grad):
            yield f"{name}: {_tell(one)}, the graph gives {_tell(other)}"
        elif not torch.allclose(one.double(), other.double(), equal_nan=True):
            yield f"{name} of {tuple(one.shape)} has other values"


def _tell(tensor: Tensor) -> str:
    return (f"{str(tensor.dtype)[6:]}{list(tensor.shape)}/{list(tensor.stride())}"
            f"{' with a gradient' if tensor.requires_grad else ''}")


class _Run(GraphInterpreter):  # runs a graph on real tensors and keeps a copy of what each node's result is like
    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.alive: list[Any] = []  # so that no address is given again
        self.seen: dict[str, Any] = {}
        self.storages: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:  # run one node
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "output":
            self.seen[n.name] = tuple(result.shape), result.stride(), result.dtype
            self.storages[n.name] = result.untyped_storage()._cdata
            self.alive.append(result.untyped_storage())
        return result


def compare_nodes(program: TensorProgram, graph: GraphModule) -> Iterator[str]:
    """Nodes whose real results are not laid out as `ShapeProp` tells, or share other memory."""
    _, args = program.build()
    prop = _Prop(graph)
    prop.propagate(*args)
    told = {n.name: n.meta["tensor_meta"] for n in graph.graph.nodes
            if isinstance(n.meta.get("tensor_meta"), tuple) and hasattr(n.meta["tensor_meta"], "stride")}
    torch.manual_seed(7)
    real = _Run(graph)
    real.run(*args)
    for name, (shape, stride, dtype) in real.seen.items():
        meta = told.get(name)
        if meta is not None and (tuple(meta.shape), _steps(meta.shape, meta.stride), meta.dtype) != (
                shape, _steps(shape, stride), dtype):
            yield f"node {name}: {dtype}{list(shape)}/{list(stride)}, told {meta.dtype}{list(meta.shape)}/{meta.stride}"
    names = [name for name in real.storages if name in prop.storages]
    for index, name in enumerate(names):
        mine, theirs = ([other for other in names[:index] if at[other] == at[name]]
                        for at in (real.storages, prop.storages))
        if mine != theirs:
            yield f"node {name} shares memory with {mine}, told {theirs}"


def _steps(shape: Any, stride: Any) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(shape, stride))


class _Prop(ShapeProp):  # keeps which storage each node's result is in
    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.storages: dict[str, int] = {}
        self._alive: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:  # run one node
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "output":
            self.storages[n.name] = result.untyped_storage()._cdata
            self._alive.append(result.untyped_storage())
        return result
