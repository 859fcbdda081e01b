"""The graph that solvers read."""
import dataclasses
from dataclasses import replace

import networkx
import pytest

from analyzer.errors import InputError
from analyzer.results.node_info import NodeInfo


def test_every_field_is_an_attribute(mlp):
    graph = mlp.to_networkx()
    assert type(graph) is networkx.DiGraph and graph.name == "Net"
    for node in mlp.nodes:
        assert graph.nodes[node.name] == {
            field.name: getattr(node, field.name) for field in dataclasses.fields(NodeInfo)
        }
    assert graph.nodes["act"]["region"] == ("no_sync", {"kind": "autocast", "id": 1})


def test_edges_carry_the_bytes_of_their_source(mlp):
    edges = mlp.to_networkx().edges(data="bytes")
    assert list(edges) == [("x", "fc1", 512), ("fc1", "act", 1024), ("act", "fc2", 1024), ("fc2", "mul", 128),
                           ("mul", "output", 128)]


def test_order_is_topological_and_a_repeated_input_is_one_edge(mlp):
    twice = NodeInfo("call_function", "twice", inputs=("x", "x"))
    graph = replace(mlp, nodes=(*mlp.nodes, twice)).to_networkx()
    assert graph.in_degree("twice") == 1
    order = {name: i for i, name in enumerate(graph)}
    assert networkx.is_directed_acyclic_graph(graph) and all(order[a] < order[b] for a, b in graph.edges)


@pytest.mark.parametrize(("node", "message"), [
    (NodeInfo("call_function", "add", inputs=("gone",)), "node 'add' reads 'gone', which is no node of this profile"),
    (NodeInfo("call_function", "fc1"), "two nodes are named 'fc1'"),
])
def test_a_graph_that_does_not_hold_together(mlp, node, message):
    with pytest.raises(InputError, match=message):
        replace(mlp, nodes=(*mlp.nodes, node)).to_networkx()
