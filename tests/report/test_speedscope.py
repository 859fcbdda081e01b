"""The flame graph for speedscope: its schema, and times that add up."""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.errors import InputError
from analyzer.results.profile import Profile

SCHEMA = json.loads((Path(__file__).parent / "speedscope" / "file-format-schema.json").read_text())


@pytest.fixture(scope="module")
def trained() -> Profile:
    return profile(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2),
                   (torch.empty(2, 8, 64),), optimizer="adamw", device="h100")


def replay(flame, frames):
    """Total time of each stack that is open at some time, and how often an operator begins; events are checked."""
    stack, totals, opened = [], Counter(), Counter()
    before = flame["startValue"]
    for event in flame["events"]:
        assert before <= event["at"] <= flame["endValue"]
        for depth in range(len(stack)):
            totals[tuple(frames[i] for i in stack[:depth + 1])] += event["at"] - before
        before = event["at"]
        if event["type"] == "O":
            stack.append(event["frame"])
            opened[tuple(frames[i] for i in stack)] += 1
        else:
            assert stack.pop() == event["frame"]  # frames are closed from the innermost on
    assert stack == []
    return totals, opened


def test_it_keeps_the_schema(trained, mlp, tmp_path):
    for p in (trained, mlp, replace(mlp, spans=())):
        p.to_speedscope(tmp_path / "s.json")
        jsonschema.validate(json.loads((tmp_path / "s.json").read_text()), SCHEMA)


def test_each_lane_is_a_flame_graph_in_time(trained):
    data = trained.to_speedscope()
    frames = [frame["name"] for frame in data["shared"]["frames"]]
    assert len(set(frames)) == len(frames) and data["name"] == "TransformerEncoder (train, predicted)"
    assert [flame["name"] for flame in data["profiles"]] == ["compute", "host"]
    compute, host = data["profiles"]
    assert compute["endValue"] == host["endValue"] == round(trained.step_seconds * 1e12) / 1e3
    totals, opened = replay(compute, frames)
    # operators last as long as their kernels
    leaves = {span.operator for span in trained.spans}
    kernels = sum(time for stack, time in totals.items() if stack[-1] in leaves)
    assert kernels == pytest.approx(trained.kernel_seconds * 1e9)
    assert sum(n for stack, n in opened.items() if stack[-1] in leaves) == sum(
        span.lane == "compute" for span in trained.spans)
    # a module is opened once in a phase, and lasts from its first kernel to its last
    stack = ("forward", "(model): TransformerEncoder", "layers: ModuleList", "layers.1: TransformerEncoderLayer")
    inside = [s for s in trained.spans
              if s.lane == "compute" and s.phase == "forward" and s.module_path.startswith("layers.1")]
    assert opened[stack] == 1
    assert totals[stack] == pytest.approx((inside[-1].end_seconds - inside[0].start_seconds) * 1e9)


def test_without_spans_operators_are_as_long_as_their_time_or_their_flops(mlp):
    """Of the operators of body.0 alone; its 8192 FLOPs take 2 us."""
    untimed = replace(mlp, spans=())
    body, = untimed.to_speedscope()["profiles"]
    assert (body["type"], body["unit"], body["weights"], body["endValue"]) == ("sampled", "seconds", [2e-6], 2e-6)
    frames = untimed.to_speedscope()["shared"]["frames"]
    assert [frames[i]["name"] for i in body["samples"][0]] == [
        "forward", "(model): Net", "body: Sequential", "body.0: Linear", "aten.addmm"]
    counted = profile(nn.Linear(4, 8, bias=False), (torch.empty(2, 4),), mode="infer", device=None)
    flops, = counted.to_speedscope()["profiles"]
    assert (flops["name"], flops["unit"], flops["weights"]) == ("operators by FLOPs", "none", [2 * 2 * 4 * 8])


def test_nothing_to_draw(bare):
    with pytest.raises(InputError, match=r"to_speedscope\(\): neither the time nor the FLOPs .* profile with a device"):
        bare.to_speedscope()
