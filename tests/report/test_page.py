"""The page of a profile stands alone, is well formed, escapes what it prints, and its data add up to the profile."""
import re
import sys
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from analyzer import profile
from analyzer.errors import MissingExtraError
from analyzer.parallel import world
from analyzer.report.page.document import unpack
from analyzer.report.page.part import describe_memory, find_blocks, thin_out
from analyzer.results.info import MemoryEvent, ModuleInfo, TimelinePoint
from analyzer.units import format_seconds

from .conftest import Read, facts


def test_a_device_that_the_catalogue_does_not_have_leaves_out_what_is_unknown_of_it(mlp):
    """A profile keeps the name alone of a `DeviceSpec` that it was given, or of the file that described it."""
    timed = {"step_seconds": 0.01, "fwd_macs": 10**9, "bwd_macs": 10**9, "autocast": "bfloat16"}
    known, unknown = (replace(mlp, device=device, **timed) for device in ("h200", "lab_card"))
    for page, has_rate in ((known.to_html(), True), (unknown.to_html(), False)):
        assert ("MFU" in Read(page).texts) == has_rate
        assert ("roofline" in [part["kind"] for part in unpack(page)]) == has_rate
    assert ">MFU<" in known._repr_html_() and ">MFU<" not in unknown._repr_html_()


def test_page_is_well_formed_and_complete(mlp, tmp_path):
    text = mlp.to_html(tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text() == text
    page = Read(text)
    for said in ("Net: one train step on h200", "Time (predicted for h200: models of kernels and host)"):
        assert any(said in data for data in page.texts), said
    assert [part["kind"] for part in unpack(text)] == ["verdict", "memory", "phases", "lanes", "modules", "roofline",
                                                       "nodes", "text"]
    nodes = {column["title"]: column for column in facts(text, "nodes")["columns"]}
    assert nodes["Op"]["values"] == [node.name for node in mlp.nodes]
    assert nodes["Fwd FLOPs"]["values"] == [node.fwd_flops for node in mlp.nodes]
    modules = facts(text, "modules")
    assert "(own)" in modules["name"] and "ReLU (same as body.1)" in modules["type"]


def test_page_fetches_nothing(mlp):
    text = mlp.to_html()
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|object)|<script[^>]* src=|@import|url\(", text.partition("<script>")[0])


def test_names_are_escaped(mlp):
    nasty = "</script><script>alert('&')</script>"
    p = replace(mlp, name=nasty, assumptions=(nasty,), nodes=(replace(mlp.nodes[0], name=nasty),),
                modules=ModuleInfo(path="", type=nasty), timeline=(TimelinePoint(nasty, 1, nasty),))
    text = p.to_html()
    assert "alert('" not in text  # in the data it is packed, elsewhere escaped
    assert "".join(Read(text).texts).count(nasty) >= 3  # title, heading, assumption


def test_unknown_profile(bare):
    assert [part["kind"] for part in unpack(bare.to_html())] == ["verdict", "text"]


def test_without_plotly(mlp, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtraError, match=r"plotly, which is not installed: .* '.\[report\]'"):
        mlp.to_html()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(9)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module", params=[True, False], ids=["replayed", "run"])
def trained(request):
    return profile(Net(), args=(torch.empty(4, 16, 32),), optimizer="adamw", device="h100", reuse=request.param)


def test_blocks_add_up_to_the_allocated_bytes_of_every_moment(trained):
    memory = describe_memory(trained)
    points, blocks = memory["points"], memory["blocks"]
    change = [0] * (len(points["allocated"]) + 1)
    for nbytes, born, freed in zip(blocks["bytes"], blocks["born"], blocks["freed"]):
        change[born] += nbytes
        change[freed] -= nbytes
    assert list(accumulate(change))[:-1] == points["allocated"] == [p.allocated_bytes for p in trained.timeline]


def test_the_peak_is_held_as_the_profile_says(trained):
    memory = describe_memory(trained)
    points, blocks, holders = memory["points"], memory["blocks"], memory["holders"]
    peak = points["allocated"].index(trained.peak_allocated_bytes)
    found = dict.fromkeys(memory["categories"], 0)
    for holder, nbytes, born, freed in zip(*blocks.values()):
        if born <= peak < freed:
            found[memory["categories"][holders["category"][holder]]] += nbytes
    assert {name: size for name, size in found.items() if size} == trained.peak_by_category


def test_what_runs_at_a_moment_is_named_with_its_line(trained):
    memory = describe_memory(trained)
    place = memory["labels"].index("layers_0")
    assert memory["operators"][place] == "module layers.0" and memory["modules"][place] == "layers.0"
    assert memory["sources"][place].startswith(f"{__file__}:")  # the line of Net that called the layer


def test_a_block_that_no_moment_sees_is_left_out():
    points = [TimelinePoint("a", 8, event=1), TimelinePoint("b", 0, event=4)]
    events = [MemoryEvent("alloc", 0, 8, "a", "activation"), MemoryEvent("alloc", 8, 4, "b", "temporary"),
              MemoryEvent("free", 8, 4), MemoryEvent("free", 0, 8)]
    assert find_blocks(points, events) == ([(0, 8, 0, 1)], [("a", "activation")])


def test_long_timeline_is_thinned_and_keeps_its_peaks():
    points = [TimelinePoint(i, i % 7, "forward" if i < 30_000 else "backward") for i in range(50_000)]
    points[12_345] = TimelinePoint("spike", 10_000, "forward")
    thinned = thin_out(points, 2000)
    assert 1000 < len(thinned) <= 2002 and points[12_345] in thinned
    assert [p.phase for p in thinned] == sorted((p.phase for p in thinned), reverse=True)


def test_lanes_are_the_spans_of_the_profile(trained):
    lanes = facts(trained.to_html(), "lanes")
    names = lanes["texts"]["lane"]
    assert len(lanes["start"]) == len(trained.spans)
    for lane in names:
        mine = sum(s for s, i in zip(lanes["seconds"], lanes["columns"]["lane"]) if names[i] == lane)
        assert mine == pytest.approx(sum(span.seconds for span in trained.spans if span.lane == lane) * 1e12, abs=2)
    end = max(start + length for start, length in zip(lanes["start"], lanes["seconds"]))
    assert end == pytest.approx(trained.step_seconds * 1e12, abs=2)


def test_communication_of_a_rank_is_told_as_the_profile_tells_it():
    def build():
        model = Net()
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    with world(8, cluster="dgx_h100"):
        p = profile(build, args=(torch.empty(4, 16, 32),), optimizer="sgd", device="h100")
    text = p.to_html()
    exposed = sum(phase.exposed_comm_seconds for phase in p.phases.values())
    assert facts(text, "lanes")["exposed_seconds"] == exposed == pytest.approx(sum(c.exposed_seconds for c in p.comm))
    comm = facts(text, "communication")
    assert sum(comm["totals"]["bytes"]) == sum(c.bytes for c in p.comm) == sum(comm["calls"]["bytes"])
    assert format_seconds(exposed) in text  # on the first screen
