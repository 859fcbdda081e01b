"""The Chrome trace: lanes of a step in time, memory beside them."""
import json
import math
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.parallel import world


def of_kind(trace, kind):
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_without_spans_it_is_empty(mlp, tmp_path):
    trace = replace(mlp, spans=(), timeline=()).to_chrome_trace(tmp_path / "t.json")
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}
    assert trace["otherData"]["times"] == "no time of a kernel is known"
    assert json.loads((tmp_path / "t.json").read_text()) == trace


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
