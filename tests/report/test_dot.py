"""The graph in DOT: what pydot, Graphviz and Netron make of it."""
from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import netron
import pydot
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.errors import InputError
from analyzer.results.info import ModuleInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

NASTY = 'a"b\\ c{d}|<e>\nf&g;'
# Netron's own reader of DOT files, and its reader of text.
_READ = """
import * as text from './text.mjs';
import { ModelFactory } from './dot.mjs';
import fs from 'fs';
const data = fs.readFileSync(process.argv[2]);
const context = {
    read: async (kind) => kind === 'text' ? text.Reader.open(data, 0x10000) : text.Decoder.open(data),
    set: (kind) => kind };
const factory = new ModelFactory();
if (await factory.match(context) !== 'dot') throw new Error('this is no DOT file');
const graph = (await factory.open(context)).modules[0];
console.log(JSON.stringify(graph.nodes.map((node) => ({ name: node.name, type: node.type.name,
    inputs: node.inputs.flatMap((argument) => argument.value.map((value) => value.name)),
    attributes: Object.fromEntries(node.attributes.map((argument) => [argument.name, argument.value])) }))));
"""


def open_in_netron(dot: str, folder: Path) -> list[dict]:
    shipped = Path(netron.__file__).parent
    for name in ("dot", "text"):
        shutil.copy(shipped / f"{name}.js", folder / f"{name}.mjs")
    (folder / "read.mjs").write_text(_READ)
    (folder / "graph.dot").write_text(dot)
    done = subprocess.run(["node", "read.mjs", "graph.dot"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.body = nn.LayerNorm(64), nn.GELU(), nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for linear in self.body:
            x = x + self.act(linear(self.norm(x)))
        return x


@pytest.fixture(scope="module")
def trained() -> Profile:
    return profile(nn.Sequential(Block(), Block(), nn.Linear(64, 8)), (torch.empty(2, 64),), optimizer="adamw",
                   device="h100")


@pytest.fixture
def nasty() -> Profile:
    nodes = (NodeInfo("placeholder", "graph"), NodeInfo("call_module", NASTY, NASTY, NASTY, inputs=("graph",)),
             NodeInfo("call_function", "node", NASTY, f"{NASTY}.x", inputs=(NASTY,), source=NASTY),
             NodeInfo(NASTY, "node_", "f", f"{NASTY}.x", inputs=("graph", "node")))
    return Profile(name=NASTY, mode="infer", nodes=nodes, modules=ModuleInfo(path=NASTY, type=NASTY))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot calls pyparsing by its old names
def test_pydot_finds_nodes_edges_and_modules(trained):
    graph, = pydot.graph_from_dot_data(trained.to_dot())
    assert [node.get_name() for node in graph.get_nodes()] == ["node", *(f'"{n.name}"' for n in trained.nodes)]
    edges = {(edge.get_source().strip('"'), edge.get_destination().strip('"')) for edge in graph.get_edges()}
    assert edges == {(source, node.name) for node in trained.nodes for source in node.inputs}

    clusters = {cluster.get_label().strip('"'): cluster for cluster in graph.get_subgraphs()}
    # the last layer is one node, and so is each call of a layer
    assert list(clusters) == ["0", "1"]
    inner, = clusters["1"].get_subgraphs()
    assert inner.get_label() == '"1.body"'
    held = {node.get_name().strip('"') for cluster in (inner, clusters["1"]) for node in cluster.get_nodes()}
    assert held == {node.name for node in trained.nodes if node.module_path.split(".")[0] == "1"} != set()


def test_colors_are_in_proportion_to_cost(mlp):
    """FLOPs forward and backward: fc1 8192 + 8192, fc2 2048 + 4096, act 256 + 256; white to #f0643c."""
    def colors(color):
        graph, = pydot.graph_from_dot_data(mlp.to_dot(color=color))
        return {node.get_name().strip('"'): (node.get("fillcolor") or node.get("style")).strip('"')
                for node in graph.get_nodes() if node.get_name() != "node"}

    share = 6144 / 16384  # of fc2
    expected = "".join(f"{round(255 + (end - 255) * share):02x}" for end in (240, 100, 60))
    found = colors("flops")
    assert found["fc1"] == "#f0643c" and found["fc2"] == f"#{expected}" and found["x"] == "#ffffff"
    # the forward time of "mul" is unknown, and both of "output"
    assert colors("seconds")["mul"] == colors("seconds")["output"] == "dashed"
    assert colors("seconds")["fc2"] == "#f0643c"    # 2 + 4 us
    assert colors("bytes")["act"] == "#f0643c"      # of 1024 bytes, as fc1's
    # an inference step has no backward pass whose time could be unknown
    inference = replace(mlp, mode="infer", nodes=tuple(replace(n, bwd_seconds=None) for n in mlp.nodes[:4]))
    assert "dashed" not in inference.to_dot()


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("which", ["trained", "nasty", "mlp"])
def test_graphviz_draws_it(which, request):
    p = request.getfixturevalue(which)
    done = subprocess.run(["dot", "-Tplain"], input=p.to_dot(), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    drawn = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    assert len(drawn) == len(p.nodes)
    edges = [line for line in done.stdout.splitlines() if line.startswith("edge ")]
    assert len(edges) == len({(source, node.name) for node in p.nodes for source in node.inputs})


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_netron_opens_it(trained, tmp_path):
    rows = open_in_netron(trained.to_dot(), tmp_path)
    assert [row["name"] for row in rows] == [node.name for node in trained.nodes]
    types = {module.path: module.type for module in trained.modules.walk()}
    for row, node in zip(rows, trained.nodes):
        assert sorted(row["inputs"]) == sorted(node.inputs)
        kind = {"call_module": types.get(node.module_path), "call_function": node.target}
        assert row["type"] == kind.get(node.op, node.op)
        if node.op in kind:
            assert row["attributes"].keys() >= {"time", "FLOPs", "bytes of outputs"}


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_names_break_out_of_nothing(nasty, tmp_path):
    graph, = pydot.graph_from_dot_data(nasty.to_dot())
    escaped = "a&#34;b&#92; c&#123;d&#125;&#124;&#60;e&#62; f&#38;g;"
    # words of the language are no names, and stay apart from names that are like their mark
    names = ["graph_", escaped, "node_", "node__"]
    assert [node.get_name().strip('"') for node in graph.get_nodes()] == ["node", *names]
    rows = open_in_netron(nasty.to_dot(), tmp_path)
    assert [(row["name"], row["inputs"]) for row in rows] == [
        ("graph_", []), (escaped, ["graph_"]), ("node_", [escaped]), ("node__", ["graph_", "node_"])]


def test_file_is_the_text(mlp, tmp_path):
    text = mlp.to_dot(tmp_path / "g.dot", color="bytes")
    assert (tmp_path / "g.dot").read_text() == text == mlp.export("dot", color="bytes")


@pytest.mark.parametrize(("given", "color", "words"), [
    ((NodeInfo("f", "a"),), "money", ["to_dot(color='money')", "'seconds', 'flops', 'bytes'"]),
    ((), "flops", ["to_dot()", "no nodes"]),
    ((NodeInfo("f", "a"), NodeInfo("f", "a")), "flops", ["two nodes are named 'a'"]),
    ((NodeInfo("f", "a", inputs=("b",)),), "flops", ["'a' reads 'b'", "no node"]),
])
def test_errors(given, color, words):
    with pytest.raises(InputError) as caught:
        Profile(name="n", mode="infer", nodes=given).to_dot(color=color)
    assert all(word in str(caught.value) for word in words), caught.value


def test_modules_within_modules_are_clusters_within_clusters():
    nodes = tuple(NodeInfo("call_function", f"{path}_{i}".replace(".", "_"), "f", path)
                  for path in ("a", "a.b", "a.b.c", "a.d", "e") for i in range(2))
    graph, = pydot.graph_from_dot_data(Profile(name="n", mode="infer", nodes=nodes).to_dot())

    def walk(graph):
        return {cluster.get_label().strip('"'): ([n.get_name().strip('"') for n in cluster.get_nodes()], walk(cluster))
                for cluster in graph.get_subgraphs()}

    assert walk(graph) == {
        "a": (["a_0", "a_1"], {"a.b": (["a_b_0", "a_b_1"], {"a.b.c": (["a_b_c_0", "a_b_c_1"], {})}),
                               "a.d": (["a_d_0", "a_d_1"], {})}),
        "e": (["e_0", "e_1"], {})}
