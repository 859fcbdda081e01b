"""The annotated graph as a networkx DiGraph, which is what a solver reads."""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

if TYPE_CHECKING:
    import networkx


@register_exporter.shipped("networkx")
def to_networkx(profile: Profile) -> networkx.DiGraph[str]:
    """Nodes by name with every field as an attribute; an edge from each input, with the ``bytes`` of its outputs.
    ``graph.graph`` holds the ``name``, ``mode`` and ``device`` of the profile and the ``schema_version`` of the
    attributes (docs/node_info.md). Raises InputError where two nodes have one name or an input is no node.
    """
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph(name=profile.name, mode=profile.mode, device=profile.device,
                                                    schema_version=NodeInfo.schema_version)
    for node in profile.nodes:
        if node.name in graph:
            raise InputError(f"to_networkx(): two nodes are named {node.name!r}; names must be unique")
        graph.add_node(node.name, **{field.name: getattr(node, field.name) for field in dataclasses.fields(node)})
    output_bytes = {node.name: sum(tensor.nbytes for tensor in node.outputs) for node in profile.nodes}
    for node in profile.nodes:
        for source in node.inputs:
            if source not in output_bytes:
                raise InputError(
                    f"to_networkx(): node {node.name!r} reads {source!r}, which is no node of this profile")
            graph.add_edge(source, node.name, bytes=output_bytes[source])
    return graph
