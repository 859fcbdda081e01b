"""A graph as plain data: pickling the linked nodes themselves would recurse as deep as the graph is long."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from analyzer.fx.trace.call_target import find_by_name, qualified_name

from .codegen import RegionCodeGen
from .traced_graph import TracedGraph


class _Reference(NamedTuple):
    """A node in the arguments of another one."""

    position: int


class _Named(NamedTuple):
    """What torch has under a name: its functions and memory formats cannot all be pickled."""

    name: str


class _PackedNode(NamedTuple):
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]


class PackedGraph(NamedTuple):
    """The nodes of a graph in order, and what its code generator knows."""

    nodes: list[_PackedNode]
    keyword_only: frozenset[str]


def pack_graph(graph: fx.Graph) -> PackedGraph:
    """``graph`` as data that can be pickled."""
    positions = {n: i for i, n in enumerate(graph.nodes)}

    def pack(argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda n: _Reference(positions[n]))

    nodes = [_PackedNode(n.op, n.name, _name(n.target), _plain(pack(n.args)), _plain(pack(n.kwargs)), n.type, n.meta)
             for n in graph.nodes]
    return PackedGraph(nodes, getattr(graph._codegen, "keyword_only", frozenset()))


def _plain(value: Any) -> Any:
    """torch.fx's immutable containers as Python's own, what torch has under a name by that."""
    if isinstance(value, _Reference):
        return value
    if isinstance(value, torch.memory_format):
        return _Named(str(value))
    if isinstance(value, tuple):
        items = [_plain(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _name(target: Any) -> Any:
    name = None if isinstance(target, str) else qualified_name(target)
    return target if name is None else _Named(name)


def unpack_graph(packed: PackedGraph) -> fx.Graph:
    """The graph that was packed."""
    graph = TracedGraph(RegionCodeGen(packed.keyword_only))
    nodes: list[fx.Node] = []

    def unpack(value: Any) -> Any:
        if isinstance(value, _Reference):
            return nodes[value.position]
        if isinstance(value, _Named):
            return find_by_name(value.name)
        if isinstance(value, tuple):
            items = [unpack(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [unpack(v) for v in value]
        if isinstance(value, slice):
            return slice(unpack(value.start), unpack(value.stop), unpack(value.step))
        return {k: unpack(v) for k, v in value.items()} if isinstance(value, dict) else value

    for n in packed.nodes:
        node = graph.create_node(n.op, unpack(n.target), unpack(n.args), unpack(n.kwargs), n.name, n.type)
        node.meta = n.meta
        nodes.append(node)
    return graph
