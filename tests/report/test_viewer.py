"""Files for viewers: the lanes of a step in time as a Chrome trace, and memory as torch's own readers and the viewer at
pytorch.org/memory_viz need it.
"""
import base64
import json
import math
import pickle
import pickletools
import re
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from analyzer import ProfileOptions, profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions
from analyzer.parallel import world
from analyzer.results.info import MemoryEvent


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


BASE = 0x7F0000000000
MIB = 2**20
# What `unpickle` of PyTorch's torch/utils/viz/MemoryViz.js knows, by pickletools' names.
VIEWER_OPCODES = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST",
    "DICT", "SETITEM"
}


def profile_of(*events, **more):
    return Profile(name="p", mode="infer", memory_events=tuple(MemoryEvent(*event) for event in events), **more)


def check_blocks(snapshot):
    for segment in snapshot["segments"]:
        cursor = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == cursor and block["size"] > 0
            cursor += block["size"]
        assert cursor == segment["address"] + segment["total_size"]
        assert segment["allocated_size"] == sum(
            b["size"] for b in segment["blocks"] if b["state"] == "active_allocated")


def test_segment_of_the_mlp(mlp):
    snapshot = mlp.to_memory_snapshot()
    segment, = snapshot["segments"]
    assert (segment["address"], segment["total_size"], segment["allocated_size"],
            segment["segment_type"]) == (BASE, 2 * MIB, 2560, "small")
    blocks = [(b["address"] - BASE, b["size"], b["state"], [f["name"] for f in b["frames"]]) for b in segment["blocks"]]
    assert blocks == [(0, 2048, "active_allocated", ["body.0.weight"]), (2048, 512, "active_allocated", ["fc2"]),
                      (2560, 2 * MIB - 2560, "inactive", [])]
    assert (segment["requested_size"], segment["blocks"][0]["requested_size"]) == (1600 + 512, 1600)
    check_blocks(snapshot)


# The keys of those that torch 2.8 dumps on a GPU, and of their parts.
SNAPSHOT_KEYS = {
    "snapshot": "segments device_traces allocator_settings external_annotations",
    "segment": "device address total_size allocated_size active_size requested_size stream segment_type "
               "segment_pool_id is_expandable frames blocks",
    "block": "address size requested_size state frames",
    "event": "action addr size stream time_us compile_context user_metadata frames",
    "settings": "PYTORCH_CUDA_ALLOC_CONF max_split_size garbage_collection_threshold expandable_segments "
                "pinned_num_register_threads release_lock_on_cudamalloc pinned_use_cuda_host_register "
                "graph_capture_record_stream_reuse roundup_power2_divisions",
    "annotation": "stage name device time_us"}


def test_fields_are_those_of_torch(trained):
    snapshot = trained.to_memory_snapshot()
    trace, = snapshot["device_traces"]
    found = {"snapshot": snapshot, "segment": snapshot["segments"][0], "block": snapshot["segments"][0]["blocks"][0],
             "event": trace[0], "settings": snapshot["allocator_settings"],
             "annotation": snapshot["external_annotations"][0]}
    assert {kind: set(keys.split()) - found[kind].keys() for kind, keys in SNAPSHOT_KEYS.items()} == dict.fromkeys(
        SNAPSHOT_KEYS, set())
    times = [event["time_us"] for event in trace if event["action"] != "snapshot"]
    assert times == sorted(times) and times[0] == 0 < times[-1] <= trained.step_seconds * 1e6
    phases = [(a["stage"], a["name"]) for a in snapshot["external_annotations"]]
    assert phases == [(stage, name) for name in ("forward", "backward", "optimizer", "zero_grad") for stage in (
        "START", "END")][:len(phases)]
    assert not any(frame["filename"] == "unknown" for event in trace for frame in event["frames"])


@pytest.mark.parametrize(("settings", "expected"), [
    ("", {"max_split_size": -1, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False}),
    ("expandable_segments:True, max_split_size_mb:64,pinned_num_register_threads:8,pinned_use_cuda_host_register:True",
     {"expandable_segments": True, "max_split_size": 64 * MIB, "pinned_num_register_threads": 8,
      "pinned_use_cuda_host_register": True, "graph_capture_record_stream_reuse": False}),
    ("roundup_power2_divisions:[2:4,>:8]", {"roundup_power2_divisions": {
        "1": 4, "2": 4, **{str(1 << i): 8 for i in range(2, 16)}}})])
def test_settings_are_those_of_the_profile(mlp, settings, expected):
    options = ProfileOptions(allocator=AllocatorOptions.from_string(settings), keep_events=True)
    p = profile(nn.Linear(2, 2), (torch.empty(1, 2),), options=options, device="h100")
    for of_it in (p, Profile.from_json(p.to_json())):
        found = of_it.to_memory_snapshot()["allocator_settings"]
        assert found["PYTORCH_CUDA_ALLOC_CONF"] == settings == of_it.allocator_settings
        assert {key: found[key] for key in expected} == expected
    assert mlp.allocator_settings is None and mlp.to_memory_snapshot()["allocator_settings"] == {}


def test_trace_of_the_mlp(mlp):
    trace, = mlp.to_memory_snapshot()["device_traces"]
    assert [event["action"] for event in trace] == [
        "segment_alloc", "alloc", "alloc", "alloc", "free_requested", "free_completed", "alloc", "free_requested",
        "free_completed", "snapshot"
    ]
    # a node whose source is known brings its own frame, others their category
    assert trace[2]["frames"] == [{"filename": "net.py", "line": 12, "name": "fc1"}]
    assert trace[1]["frames"] == [{"filename": "parameter", "line": 0, "name": "body.0.weight"}]
    assert trace[1]["category"] == "parameter"
    assert (trace[0]["frames"], trace[0]["size"], trace[1]["size"], trace[2]["size"]) == ([], 2 * MIB, 1600, 1024)
    # the viewer fails on categories without "unknown"
    assert "unknown" in {event["category"] for event in trace}


@pytest.mark.parametrize("expandable", [False, True])
def test_each_reader_of_torch_takes_that_of_a_training_step(expandable):
    options = ProfileOptions(allocator=AllocatorOptions(expandable_segments=expandable))
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())
    p = profile(model, (torch.empty(8, 3, 64, 64),), optimizer="adamw", options=options, device="h100")
    snapshot, end = p.to_memory_snapshot(), list(p.phases.values())[-1]
    _memory_viz.segsum(snapshot)  # asserts its own balance
    assert _memory_viz.trace(snapshot).count("\n") > len(p.memory_events) / 2
    # a line a block: where it is, its state, its frames and its bytes
    for read in (_memory_viz.segments, _memory_viz.memory):
        lines = read(snapshot, format_flamegraph=str.splitlines)
        free = [";inactive;" in line for line in lines]
        sizes = [int(line.rpartition(" ")[2]) for line in lines]
        assert sum(sizes) == end.reserved_bytes
        assert sum(size for size, is_free in zip(sizes, free) if not is_free) == end.allocated_bytes
    for html in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot),
                 _memory_viz.trace_plot(snapshot, plot_segments=True)):
        assert pickle.loads(base64.b64decode(re.search(r'"base64": "([^"]+)"', html)[1])) == snapshot
    # what is never freed in the trace is what is there at its end, as it was asked for
    left = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    asked = sum(segment["requested_size"] for segment in snapshot["segments"])
    assert sum(e["size"] for e in left if e["action"] == "alloc") == asked < end.allocated_bytes


def test_file_is_a_pickle_that_the_viewer_can_read(mlp, tmp_path):
    snapshot = mlp.to_memory_snapshot(tmp_path / "m.pickle")
    data = (tmp_path / "m.pickle").read_bytes()
    assert pickle.loads(data) == snapshot
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VIEWER_OPCODES
    assert 2 <= data[1] <= 4  # protocols that it accepts


def test_without_segments_each_span_of_addresses_is_one():
    snapshot = profile_of(("alloc", BASE, 512, "a"), ("alloc", BASE + 512, 512, "b"), ("free", BASE, 512, "a"),
                          ("alloc", BASE + 4 * MIB, 3 * MIB, "c")).to_memory_snapshot()
    assert [(s["address"] - BASE, s["total_size"], s["segment_type"]) for s in snapshot["segments"]] == [
        (0, 1024, "small"), (4 * MIB, 3 * MIB, "large")]
    check_blocks(snapshot)


def test_freed_segments_are_gone_and_earlier_blocks_have_a_place():
    snapshot = profile_of(("free", BASE, 512, "before"), ("segment_alloc", BASE + 4 * MIB, 2 * MIB),
                          ("alloc", BASE + 4 * MIB, 512, "a"), ("free", BASE + 4 * MIB, 512, "a"),
                          ("segment_free", BASE + 4 * MIB, 2 * MIB)).to_memory_snapshot()
    assert [(s["address"], s["total_size"], s["allocated_size"]) for s in snapshot["segments"]] == [(BASE, 512, 0)]
    check_blocks(snapshot)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8), st.booleans()), max_size=40))
def test_books_balance(acts):
    """Random allocations on a grid of 16 places, frees of live ones; the segment is given or not."""
    live, events = {}, []
    for place, size, is_free in acts:
        address = BASE + place * 4096
        if is_free and address in live:
            events.append(("free", address, live.pop(address), "x"))
        elif not is_free and address not in live:
            live[address] = size * 512
            events.append(("alloc", address, size * 512, "x"))
    for given_segment in ([], [("segment_alloc", BASE, 2 * MIB)]):
        if not (events or given_segment):
            continue
        snapshot = profile_of(*given_segment, *events).to_memory_snapshot()
        check_blocks(snapshot)
        assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == sum(live.values())
        _memory_viz.segsum(snapshot)  # asserts its own balance
        spans = [(s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"]]
        assert all(any(low <= e["addr"] < high for low, high in spans) for e in snapshot["device_traces"][0][:-1])


@pytest.mark.parametrize(("events", "words"), [
    ([], ["no memory events"]),
    ([("grow", 0, 1)], ["memory_events[0]", "'grow'", "actions are alloc, free, segment_alloc, segment_free"]),
    ([("alloc", 8, 1), ("alloc", 8, 1)], ["memory_events[1]", "already in use"]),
    ([("segment_alloc", 8, 1), ("segment_alloc", 8, 1)], ["memory_events[1]", "already in use"]),
])
def test_errors(events, words):
    with pytest.raises(InputError) as caught:
        profile_of(*events).to_memory_snapshot()
    assert all(word in str(caught.value) for word in ["to_memory_snapshot()", *words]), caught.value
