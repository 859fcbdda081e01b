"""The Chrome trace: nodes on their tracks in time, memory beside them."""
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.results.info import TimelinePoint
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile


def of_kind(trace, kind):
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_nodes_follow_one_another(mlp):
    slices = [(e["cat"], e["name"], e["ts"], e["dur"]) for e in of_kind(mlp.to_chrome_trace(), "X")]
    expected = [
        ("forward", "x", 0, 0), ("forward", "fc1", 0, 2), ("forward", "act", 2, 1), ("forward", "fc2", 3, 2),
        ("backward", "mul", 5, 1), ("backward", "fc2", 6, 4), ("backward", "act", 10, 1), ("backward", "fc1", 11, 3),
        ("backward", "x", 14, 0), ("optimizer", "optimizer", 14, 1)]
    assert [row[:2] for row in slices] == [row[:2] for row in expected]
    assert [row[2:] for row in slices] == [pytest.approx(row[2:]) for row in expected]  # microseconds


def test_unknown_time_is_an_instant(mlp):
    instants = [(e["cat"], e["name"], e["s"]) for e in of_kind(mlp.to_chrome_trace(), "i")]
    assert instants == [("forward", "mul", "t"), ("forward", "output", "t"), ("backward", "output", "t")]


def test_memory_stands_at_its_node_or_evenly_between(mlp):
    counters = [(e["ts"], e["args"]["allocated"]) for e in of_kind(mlp.to_chrome_trace(), "C")]
    # fc1 ends at 2, fc2 at 5 and call 7 lies between; backward of fc1 ends at 14; the optimizer at 15
    expected = [(2, 4096), (3.5, 9216), (5, 8192), (9.5, 12288), (14, 9728), (15, 10240)]
    assert [size for _, size in counters] == [size for _, size in expected]
    assert [time for time, _ in counters] == pytest.approx([time for time, _ in expected])
    assert all(e["args"]["reserved"] == 2097152 for e in of_kind(mlp.to_chrome_trace(), "C"))


def test_tracks_are_named_and_args_described(mlp):
    trace = mlp.to_chrome_trace()
    assert [(e["name"], e["args"]["name"]) for e in of_kind(trace, "M")] == [("process_name", "Net (train, predicted)"),
                                                                             ("thread_name", "forward"),
                                                                             ("thread_name", "backward"),
                                                                             ("thread_name", "optimizer")]
    tracks = {e["args"]["name"]: e["tid"] for e in of_kind(trace, "M") if e["name"] == "thread_name"}
    assert all(e["tid"] == tracks[e["cat"]] and e["pid"] == 1 for e in of_kind(trace, "X"))
    fc1 = next(e for e in of_kind(trace, "X") if e["name"] == "fc1")
    assert fc1["args"] == {
        "op": "call_module", "target": "body.0", "module": "body.0", "source": "net.py:12", "flops": 8192,
        "comm_bytes": None, "inputs": "x", "outputs": "float32[8, 32]"
    }
    assert trace["otherData"]["times"] == "models of kernels and host"


def test_inference_has_no_backward(mlp):
    trace = replace(mlp, mode="infer", optimizer_seconds=None).to_chrome_trace()
    assert {e["cat"] for e in of_kind(trace, "X")} == {"forward"}


def test_where_no_time_is_known_nodes_stand_in_order():
    profile = Profile(name="n", mode="infer", nodes=(NodeInfo("a", "x"), NodeInfo("a", "y")), timeline=(TimelinePoint(
        "x", 5, "forward"), ))
    trace = profile.to_chrome_trace()
    assert [(e["ts"], e["dur"]) for e in of_kind(trace, "X")] == [(0, 1), (1, 1)]
    assert of_kind(trace, "C")[0]["ts"] == 1 and "no time is known" in trace["otherData"]["times"]


def test_file_is_the_same_json(mlp, tmp_path):
    trace = mlp.to_chrome_trace(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == trace


points = st.builds(TimelinePoint, st.sampled_from(["a", "b", "c", "?"]), st.integers(0, 99),
                   st.sampled_from(["forward", "backward", "zero_grad", None]))


@given(st.lists(points, max_size=12), st.lists(st.none() | st.floats(0, 1), min_size=3, max_size=3))
def test_memory_never_runs_backwards(timeline, seconds):
    nodes = tuple(NodeInfo("f", name, fwd_seconds=s, bwd_seconds=s) for name, s in zip("abc", seconds, strict=True))
    trace = Profile(name="n", mode="train", nodes=nodes, timeline=tuple(timeline)).to_chrome_trace()
    times = [e["ts"] for e in of_kind(trace, "C")]
    assert times == sorted(times) and len(times) == len(timeline)
    end = max((e["ts"] + e.get("dur", 0) for e in trace["traceEvents"] if e["ph"] in "Xi"), default=0)
    assert all(0 <= time <= end * (1 + 1e-9) for time in times)
