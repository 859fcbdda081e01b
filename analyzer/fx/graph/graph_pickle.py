"""A graph as plain data: pickling the linked nodes themselves would recurse as deep as the graph is long."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from analyzer.fx.trace.call_target import find_by_name, qualified_name

from .codegen import RegionCodeGen
from .traced_graph import TracedGraph


@dataclass(frozen=True)
class _Reference:
    """A node in the arguments of another one."""

    position: int


@dataclass(frozen=True)
class _Named:
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

    def pack(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Reference(positions[value])
        return _Named(str(value)) if isinstance(value, torch.memory_format) else value

    nodes = [_PackedNode(n.op, n.name, _name(n.target), map_aggregate(n.args, pack), map_aggregate(n.kwargs, pack),
                         n.type, n.meta) for n in graph.nodes]
    return PackedGraph(nodes, getattr(graph._codegen, "keyword_only", frozenset()))


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
        return find_by_name(value.name) if isinstance(value, _Named) else value

    for n in packed.nodes:
        node = graph.create_node(n.op, unpack(n.target), map_aggregate(n.args, unpack),
                                 map_aggregate(n.kwargs, unpack), n.name, n.type)
        node.meta = n.meta
        nodes.append(node)
    return graph
