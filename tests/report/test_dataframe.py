"""The pandas views."""
import sys
from dataclasses import replace

import pytest

from analyzer.errors import InputError, MissingExtraError
from analyzer.results.info import CostInfo
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo

pandas = pytest.importorskip("pandas")


def test_nodes(mlp):
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


def test_modules(mlp):
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
    assert [tuple(row) for row in events.itertuples(index=False)] == list(mlp.memory_events)


def test_empty(bare):
    assert len(bare.to_dataframe()) == 0 and list(bare.to_dataframe().columns) == list(NodeInfo.__slots__)
    assert len(bare.to_dataframe("modules")) == 0


def test_unknown_table(mlp):
    with pytest.raises(InputError, match=r"to_dataframe\('layers'\): choose one of 'modules', 'nodes', 'comm', "):
        mlp.to_dataframe("layers")


def test_pandas_missing(mlp, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'symbolic-analyzer\[report\]'"):
        mlp.to_dataframe()
