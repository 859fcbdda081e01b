"""The Chrome trace: lanes of a step, or nodes on their tracks, in time, memory beside them."""
import json
import math
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from analyzer import profile
from analyzer.parallel import world
from analyzer.results.info import TimelinePoint
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile


@pytest.fixture
def untimed(mlp):
    """A profile of which only sums of nodes are known."""
    return replace(mlp, spans=())


def of_kind(trace, kind):
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_nodes_follow_one_another(untimed):
    slices = [(e["cat"], e["name"], e["ts"], e["dur"]) for e in of_kind(untimed.to_chrome_trace(), "X")]
    expected = [
        ("forward", "x", 0, 0), ("forward", "fc1", 0, 2), ("forward", "act", 2, 1), ("forward", "fc2", 3, 2),
        ("backward", "mul", 5, 1), ("backward", "fc2", 6, 4), ("backward", "act", 10, 1), ("backward", "fc1", 11, 3),
        ("backward", "x", 14, 0), ("optimizer", "optimizer", 14, 1)]
    assert [row[:2] for row in slices] == [row[:2] for row in expected]
    assert [row[2:] for row in slices] == [pytest.approx(row[2:]) for row in expected]  # microseconds


def test_unknown_time_is_an_instant(untimed):
    instants = [(e["cat"], e["name"], e["s"]) for e in of_kind(untimed.to_chrome_trace(), "i")]
    assert instants == [("forward", "mul", "t"), ("forward", "output", "t"), ("backward", "output", "t")]


def test_memory_stands_at_its_node_or_evenly_between(untimed):
    counters = [(e["ts"], e["args"]["allocated"]) for e in of_kind(untimed.to_chrome_trace(), "C")]
    # fc1 ends at 2, fc2 at 5 and call 7 lies between; backward of fc1 ends at 14; the optimizer at 15
    expected = [(2, 4096), (3.5, 9216), (5, 8192), (9.5, 12288), (14, 9728), (15, 10240)]
    assert [size for _, size in counters] == [size for _, size in expected]
    assert [time for time, _ in counters] == pytest.approx([time for time, _ in expected])
    assert all(e["args"]["reserved"] == 2097152 for e in of_kind(untimed.to_chrome_trace(), "C"))


def test_tracks_are_named_and_args_described(untimed):
    trace = untimed.to_chrome_trace()
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


def test_inference_has_no_backward(untimed):
    trace = replace(untimed, mode="infer", optimizer_seconds=None).to_chrome_trace()
    assert {e["cat"] for e in of_kind(trace, "X")} == {"forward"}


def test_where_no_time_is_known_nodes_stand_in_order():
    profile = Profile(name="n", mode="infer", nodes=(NodeInfo("a", "x"), NodeInfo("a", "y")), timeline=(TimelinePoint(
        "x", 5, "forward"), ))
    trace = profile.to_chrome_trace()
    assert [(e["ts"], e["dur"]) for e in of_kind(trace, "X")] == [(0, 1), (1, 1)]
    assert of_kind(trace, "C")[0]["ts"] == 1 and "no time is known" in trace["otherData"]["times"]


def test_file_is_the_same_json(untimed, tmp_path):
    trace = untimed.to_chrome_trace(tmp_path / "t.json")
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


@pytest.fixture(scope="module")
def sharded():
    """A training step of a rank of FSDP, on several streams."""
    from torch.distributed.fsdp import fully_shard

    def build():
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).cuda()
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    with world(8), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profile(build, (torch.empty(4, 512),), optimizer="sgd", device="h100")


@pytest.fixture(scope="module")
def trained():
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    return profile(model, (torch.empty(4, 16, 64),), optimizer="adamw", device="h100")


@pytest.fixture(params=["trained", "sharded"])
def timed(request):
    return request.getfixturevalue(request.param)


def test_a_trace_keeps_the_rules_of_its_format(timed, tmp_path):
    timed.to_chrome_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys() and event["ph"] in "XCMsf"
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and type(event["args"]["name"]) is str
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0 and (event["pid"], event["tid"]) in tracks
        if event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())
    # each arrow has two ends, each in a slice of its track
    slices = {(e["pid"], e["tid"], e["ts"]) for e in of_kind(trace, "X")}
    begins, ends = ({e["id"]: (e["pid"], e["tid"], e["ts"]) for e in of_kind(trace, ph)} for ph in "sf")
    assert begins.keys() == ends.keys() and {*begins.values(), *ends.values()} <= slices
    assert all(e["bp"] == "e" for e in of_kind(trace, "f"))
    assert len(begins) == sum(span.lane != "host" for span in timed.spans)
    # slices of one track never overlap
    for track in tracks:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in of_kind(trace, "X") if (e["pid"], e["tid"]) == track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(times))


def test_lanes_are_tracks_at_their_times(timed):
    trace = timed.to_chrome_trace()
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of_kind(trace, "M") if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    slices = [(names[e["pid"], e["tid"]], e["cat"], e["name"], round(e["ts"] * 1e6), round(e["dur"] * 1e6))
              for e in of_kind(trace, "X") if e["cat"] != "phase"]
    assert slices == [(s.lane, s.kind, s.name, round(s.start_seconds * 1e12), round(s.seconds * 1e12))
                      for s in timed.spans]
    # nothing is launched to drop the gradients
    assert [e["name"] for e in of_kind(trace, "X") if e["cat"] == "phase"] == ["forward", "backward", "optimizer"]
    processes = {e["args"]["name"]: e["pid"] for e in of_kind(trace, "M") if e["name"] == "process_name"}
    what = f"{timed.name} (train, predicted)"
    assert processes == {f"{what}: host": 1, f"{what}: h100_sxm": 2}


def test_counters_stand_at_their_times(timed):
    trace = timed.to_chrome_trace()
    memory, flops = ([e for e in of_kind(trace, "C") if e["name"] == name] for name in ("memory bytes", "FLOP/s"))
    assert [(e["args"]["allocated"], e["args"]["reserved"]) for e in memory] == [
        (point.allocated_bytes, point.reserved_bytes) for point in timed.timeline]
    assert [e["ts"] for e in memory] == pytest.approx([p.seconds * 1e6 for p in timed.timeline], abs=0.0011)
    assert all(a["ts"] < b["ts"] for a, b in pairwise(memory))
    assert [e["ts"] for e in flops] == sorted(e["ts"] for e in flops) and flops[-1]["args"]["FLOP/s"] == 0
    # the area under the rate is the work of the step, but for what AdamW counts on the host
    area = math.fsum(a["args"]["FLOP/s"] * (b["ts"] - a["ts"]) / 1e6 for a, b in pairwise(flops))
    assert area == pytest.approx(sum(row.flops for row in timed.operators if row.seconds), rel=1e-9)


def test_memory_of_an_earlier_step_is_before_the_lanes(trained):
    first, *rest = trained.timeline
    shown = replace(trained, timeline=(first._replace(seconds=-1e-3), *rest)).to_chrome_trace()
    assert of_kind(shown, "C")[0]["ts"] == 0
    assert min(e["ts"] for e in of_kind(shown, "X")) == pytest.approx(1000)  # microseconds
