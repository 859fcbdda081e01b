"""Nodes, modules and other rows for networkx, for pandas, and in files, read back by pandas and csv."""
import csv
import dataclasses
import io
import sys
from collections import OrderedDict
from dataclasses import replace

import networkx
import pandas
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.cli import main
from analyzer.errors import InputError, MissingExtraError
from analyzer.report.export.table_file import TABLES, list_kinds
from analyzer.report.text_table import print_rows
from analyzer.results.info import CostInfo
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.run_cost import CommInfo


@pytest.fixture(scope="module")
def trained() -> Profile:
    model = nn.Sequential(OrderedDict(first=nn.Linear(64, 64), act=nn.ReLU(), last=nn.Linear(64, 8)))
    found = profile(model, (torch.empty(2, 64),), optimizer="adamw", device="h100")
    gather = CommInfo("all_gather", "dp", 8, 4096, None, "forward", "first", None, "c10d.x", None, 1e-6)
    return replace(found, comm=(gather, replace(gather, bytes=None)))


@pytest.mark.parametrize("what", TABLES)
def test_pandas_reads_csv(trained, what, tmp_path):
    trained.export("table", tmp_path / "t.csv", what=what)
    found = pandas.read_csv(tmp_path / "t.csv", keep_default_na=False, na_values=[""])
    if what == "modules":
        assert list(found["path"]) == ["(model)", "first", "act", "last", "(own)"]
        assert list(found["fwd_flops"])[:2] == [trained.fwd_flops, 2 * 2 * 64 * 64]
        return
    records = list(trained.roofline()) if what == "roofline" else getattr(trained, what)
    assert len(found) == len(records) > 0
    assert what in ("nodes", "roofline") or list(found) == list(trained.to_dataframe(what))  # every field
    for name in found:  # unrounded, and unknown is missing
        got = [None if pandas.isna(value) else value for value in found[name]]
        assert got == [value if value != "" else None for value in (getattr(record, name) for record in records)], name


def test_markdown_and_latex_are_in_units(mlp):
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in mlp.export("table", what="spans", fmt="markdown").splitlines()]
    fc1 = ["fc1", "aten.addmm.default", "fc1", "body.0", "forward"]
    assert rows[0][:3] == ["Lane", "Kind", "Name"] and rows[2:] == [
        ["host", "launch", *fc1, "0 s", "2.00 us", "-"], ["compute", "kernel", *fc1, "2.00 us", "2.00 us", "0"]]
    latex = mlp.export("table", what="memory_events", fmt="latex")
    assert latex.startswith(r"\begin{tabular}{lrrllrr}") and latex.endswith(r"\end{tabular}")
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + len(mlp.memory_events)
    assert [cell.strip() for cell in rows[1].removesuffix(r"\\").split("&")] == [
        r"segment\_alloc", str(0x7F0000000000), "2.00 MiB", "", "", "0", "-"]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_a_text_in_csv_is_no_formula(text):
    """What a name begins with makes no spreadsheet compute, and numbers stay numbers."""
    span = SpanInfo(text, "kernel", text, text, None, "", "forward", -1e-3, 2e-6)
    p = Profile(name="n", mode="infer", spans=(span,), nodes=(NodeInfo(text, "a", text, text, temp_bytes=-5),))
    row, = csv.DictReader(io.StringIO(p.export("table", what="spans")))
    assert row["lane"] == row["name"] == row["operator"] == f"'{text}"
    assert (row["kind"], row["start_seconds"]) == ("kernel", "-0.001")
    row, = csv.DictReader(io.StringIO(p.export("table")))
    assert (row["op"], row["name"], row["target"], row["temp_bytes"]) == (f"'{text}", "a", f"'{text}", "-5")
    # where the printed tables are written as CSV, too; an unknown value is no formula
    assert print_rows(["a", "b"], [[text, "-5"], ["-", "-"]], fmt="csv").splitlines()[1:] == [f"'{text},-5", "-,-"]


@pytest.mark.parametrize(("path", "options", "words"), [
    (None, {"what": "money"}, ["what='money'", "'nodes', 'modules', 'spans', 'memory_events', 'comm', 'roofline'"]),
    (None, {"fmt": "html"}, ["fmt='html'", "'csv', 'markdown', 'latex'"]),
    ("t.parquet", {}, ["'t.parquet'", ".csv, .md, .tex"]),
])
def test_errors(mlp, path, options, words):
    with pytest.raises(InputError) as caught:
        mlp.export("table", path, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_command_writes_each_kind_of_file(tmp_path, capsys):
    named = {"chrome_trace": "a.TRACE.json", "memory_snapshot": "d.snapshot.pickle", "json": "e.json", "nodes": "f.csv",
             "html": "g.html"}
    asked = [str(tmp_path / name) for name in named.values()]
    asked += [f"spans={tmp_path / 'h.csv'}", f"modules={tmp_path / 'i.md'}", f"roofline={tmp_path / 'j.csv'}",
              f"chrome_trace={tmp_path / 'odd=name'}"]
    assert main(["profile", "resnet18", "--input", "1x3x32x32", "--mode", "infer", "--device", "h100",
                 *[word for text in asked for word in ("--export", text)]]) == 0
    capsys.readouterr()
    p = Profile.from_json(tmp_path / "e.json")
    assert len(p.spans) == len(pandas.read_csv(tmp_path / "h.csv"))
    assert (tmp_path / "a.TRACE.json").read_text() == (tmp_path / "odd=name").read_text()
    assert (tmp_path / "f.csv").read_text() == p.export("table") + "\n"
    assert (tmp_path / "i.md").read_text().count("\n") == 2 + len(p.export("table", what="modules").splitlines()) - 1
    assert {path.name for path in tmp_path.iterdir()} == {*named.values(), "h.csv", "i.md", "j.csv", "odd=name"}


@pytest.mark.parametrize(("asked", "words"), [
    (["t.png"], ["--export t.png", "tells no kind", "write KIND=t.png", ".trace.json"]),
    (["lanes=t.json"], ["--export lanes=t.json", "'lanes' is no kind of file", "spans"]),
    (["table=t.csv"], ["'table' is no kind"]),
    (["dataframe=t.csv"], ["'dataframe' is no kind"]),
    (["html="], ["--export html=", "html=FILE"]),
    (["spans=t.png"], ["'t.png'", ".csv, .md, .tex"]),
    (["json=/no/such/t.json"], ["/no/such does not exist"]),
    (["a.json", "spans=t.csv", "a.json"], ["--export a.json", "two files of that name"]),
])
def test_the_command_refuses_before_any_work(asked, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "no_such_model", *[word for text in asked for word in ("--export", text)]]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and "no_such_model" not in error, error
    assert list(tmp_path.iterdir()) == []


def test_kinds_are_all_that_writes_a_file():
    shipped = {"json", "html", "chrome_trace", "memory_snapshot"}
    assert set(list_kinds()) >= {*shipped, *TABLES} and not {"table", "dataframe", "networkx"} & set(list_kinds())


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


def test_nodes_of_pandas(mlp):
    frame = mlp.to_dataframe()
    assert list(frame.columns) == list(NodeInfo.__slots__)
    assert list(frame["name"]) == ["x", "fc1", "act", "fc2", "mul", "output"]
    assert frame["fwd_flops"].sum() == mlp.fwd_flops and frame["bwd_flops"].sum() == mlp.bwd_flops
    assert frame["inputs"][3] == ("act",) and frame["outputs"][3][0].shape == (8, 4)


def test_integers_stay_exact_beside_unknowns(bare):
    frame = replace(bare, nodes=(NodeInfo("a", "b", fwd_flops=2**53 + 1), NodeInfo("a", "c"))).to_dataframe()
    assert str(frame["fwd_flops"].dtype
               ) == "Int64" and frame["fwd_flops"][0] == 2**53 + 1 and frame["fwd_flops"][1] is pandas.NA
    assert str(frame["fwd_seconds"].dtype) == "Float64" and frame["fwd_seconds"].isna().all()


def test_modules_of_pandas(mlp):
    frame = mlp.to_dataframe("modules").set_index("path")
    assert list(frame.index) == ["", "body", "body.0", "body.1", "fc2", "again"]
    for name in CostInfo.__slots__:
        total, own = frame[name], frame[f"own_{name}"]
        if name not in ("fwd_seconds", "arithmetic_seconds"):  # unknown at the root
            assert total[""] == pytest.approx(total["body"] + total["fc2"] + total["again"] + own[""]) == own.sum()
    assert frame["fwd_seconds"].isna().tolist() == [True] + [False] * 5
    assert frame["shared_with"]["again"] == "body.1" and frame["parameters"]["body.0"]["weight"].shape == (32, 16)


def test_spans_and_memory_events(mlp):
    spans = mlp.to_dataframe("spans")
    assert list(spans.columns) == list(SpanInfo._fields) and [tuple(row) for row in spans.astype(object).where(
        spans.notna(), None).itertuples(index=False)] == list(mlp.spans)
    assert (str(spans["seconds"].dtype), str(spans["launch"].dtype)) == ("Float64", "Int64")
    events = mlp.to_dataframe("memory_events")
    assert [tuple(row) for row in events.astype(object).where(events.notna(), None).itertuples(index=False)] == list(
        mlp.memory_events)


def test_nothing_in_pandas(bare):
    assert len(bare.to_dataframe()) == 0 and list(bare.to_dataframe().columns) == list(NodeInfo.__slots__)
    assert len(bare.to_dataframe("modules")) == 0


def test_unknown_table(mlp):
    with pytest.raises(InputError, match=r"to_dataframe\('layers'\): choose one of 'modules', 'nodes', 'comm', "):
        mlp.to_dataframe("layers")


def test_pandas_missing(mlp, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.\[report\]'"):
        mlp.to_dataframe()
