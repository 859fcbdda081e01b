"""The memory snapshot: what torch's own readers and the viewer at pytorch.org/memory_viz need."""
import base64
import pickle
import pickletools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions
from analyzer.results.info import MemoryEvent
from analyzer.results.profile import Profile

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
    check_blocks(snapshot)


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
    # what is never freed in the trace is what is there at its end
    left = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    assert sum(e["size"] for e in left if e["action"] == "alloc") == end.allocated_bytes


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
