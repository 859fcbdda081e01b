"""What an interactive session shows of each result: short, and what is asked first."""
import base64
import io
import re
import sys
from dataclasses import fields, replace

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint

import analyzer
from analyzer import Advice, FitTable, Profile, Verdict
from analyzer.parallel import RankTable
from analyzer.parallel.rank_row import RankRow
from analyzer.report.page.picture import draw_memory, read_colors
from analyzer.results.info import MemoryEvent, ModuleInfo, TimelinePoint
from analyzer.results.verdict import AdviceOption, FitRow
from analyzer.results.world import RankRun
from analyzer.tools.solver import Plan, PlanRegion, StepInfo, StepMemory
from analyzer.units import format_bytes

from .conftest import Read

VERDICT = Verdict(device="t4", fits=False, needed_bytes=20 * 2**30, capacity_bytes=15 * 2**30, free_bytes=-5 * 2**30,
                  phase="backward", operator="aten.mm.default", devices=("l4",))
FITS = FitTable("Net <b>: one train step", (
    FitRow(**{field.name: getattr(VERDICT, field.name) for field in fields(VERDICT)}),
    FitRow(device="l4", fits=True, needed_bytes=20 * 2**30)))


def shown(html: str) -> str:
    return " ".join(" ".join(Read(html).texts).split())


def test_a_verdict_is_a_line() -> None:
    assert repr(VERDICT) == "Verdict(does NOT fit on t4: 20.00 GiB needed, 15.00 GiB there, 5.00 GiB short)"
    assert shown(VERDICT._repr_html_()) == " ".join(str(VERDICT).split())
    assert "smallest devices with enough memory: l4" in str(VERDICT)


def test_a_table_of_devices_is_a_line_and_a_table() -> None:
    assert repr(FITS) == "FitTable(Net <b>: one train step: 2 devices, fits on l4)"
    text = shown(FITS._repr_html_())
    assert text.startswith("Net <b>: one train step Device Memory") and text.endswith("fits on l4")
    assert repr(FitTable("Net", ())).endswith("no device of these is known to hold it)")


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
                            for _ in range(200)])
    return analyzer.profile(model, args=(torch.empty(4, 8, device="meta"),), optimizer="adamw", device="t4")


def test_a_profile_is_the_pages_first_screen_and_stays_small(profile: Profile) -> None:
    assert len(repr(profile).splitlines()) <= 8
    html = profile._repr_html_()
    text = shown(html)
    assert text.startswith("Profile of Sequential: one train step on t4 (optimizer adamw) Fits on t4: ")
    verdict = str(profile.verdict).splitlines()
    assert all(line[1:] in text for line in verdict)
    # each weight 8 x 8 and 8 more, 400 of them, in float32
    assert "Parameters 28.80 K 112.50 KiB" in text and f"Peak allocated {peak(profile)}" in text
    assert "Steady step Allocated at end" in text and "First step" in text and "Comm" not in text
    assert len(html) < 60_000 and "(2 below)" in text, "400 modules more stand below these"
    small = replace(profile, modules=ModuleInfo(path="", type="Net", children=(
        ModuleInfo(path="a", type="A", depth=1, children=(ModuleInfo(path="a.b", type="B", depth=2),)),)))
    assert "below)" not in small._repr_html_() and "<b>b</b> B" in small._repr_html_()


def peak(profile: Profile) -> str:
    return format_bytes(profile.peak_allocated_bytes)


# What JupyterLab's sanitizer leaves of an output that is not trusted (apputils/src/sanitizer.ts): of the tags and
# styles that are used here, these.
_TAGS = {"div", "small", "b", "br", "table", "tbody", "thead", "tr", "td", "th", "img", "details", "summary", "p"}
_STYLES = {"border", "border-left", "border-collapse", "font-size", "margin", "margin-left", "max-width", "padding",
           "text-align", "vertical-align", "white-space", "width"}


def test_what_is_shown_needs_no_script_and_no_style_sheet(profile: Profile) -> None:
    nasty = replace(profile, name="<script>", assumptions=("<i>", *("more" for _ in range(30))))
    html = nasty._repr_html_()
    assert "<i>" not in html and "&lt;script&gt;" in html and "Assumptions (31)" in html
    assert "and 11 more, in the summary" in html
    assert {tag for tag in re.findall(r"<(\w+)", html)} <= _TAGS and "http" not in html
    styles = {name for style in re.findall(r'style="([^"]*)"', html) for name in re.findall(r"([\w-]+) *:", style)}
    assert styles <= _STYLES, styles - _STYLES


def pixels(html: str) -> numpy.ndarray:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return numpy.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")).astype(int)


def test_the_picture_stacks_what_the_timeline_holds() -> None:
    """Two categories, of which one holds a quarter of the other's bytes for half as long: an eighth of its area."""
    timeline = [TimelinePoint("a", 1000, "forward", event=1), TimelinePoint("b", 1250, "backward", event=2)]
    events = [MemoryEvent("alloc", 0, 1000, "w", "parameter"), MemoryEvent("alloc", 4096, 250, "a", "activation")]
    p = Profile(name="Net", mode="train", timeline=tuple(timeline), memory_events=tuple(events))
    drawn = pixels(p._repr_html_())
    colors = read_colors()
    assert drawn[0, 0, 3] == 0 and drawn[-1, -1, 3] == 0, "the paper shows through"

    def area(category: str) -> int:
        rgb = [int(colors[category][i:i + 2], 16) for i in (1, 3, 5)]
        inside = drawn[:, : int(drawn.shape[1] * 0.83)]  # without the legend
        return int(((abs(inside[..., :3] - rgb).max(axis=-1) < 12) & (inside[..., 3] > 250)).sum())

    assert area("activation") / area("parameter") == pytest.approx(1 / 8, rel=0.06)
    assert area("gradient") == 0 and area("temporary") == 0


def test_a_picture_is_the_same_for_the_same_profile_and_whatever_the_callers_style(profile: Profile) -> None:
    import matplotlib

    first = draw_memory(profile)
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "lines.linewidth": 9}):
        assert draw_memory(profile) == first and matplotlib.rcParams["font.size"] == 30
    assert draw_memory(Profile(name="Net", mode="train")) is None


def test_without_matplotlib_a_line_says_what_brings_the_picture(profile: Profile,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = profile._repr_html_()
    assert "<img" not in html and "Fits on t4" in html
    assert "the picture of memory: matplotlib is not installed; pip install -e '.[report]' in" in shown(html)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x)) + checkpoint(self.rest, x, use_reentrant=False)


def test_a_graph_is_its_counts_and_its_heaviest_nodes() -> None:
    x = torch.empty(4, 8)
    graph = analyzer.symbolic_trace(Blocks(), meta_args={"x": x}, trace_act_ckpt=True)
    text = shown(graph._repr_html_())
    # x, first, three of rest twice, the sum, the output
    assert text.startswith("Graph of Blocks 10 nodes: 7 call_module, 1 placeholder, 1 call_function, 1 output Not prof")
    assert "symbolic_profile(graph, *inputs)" in text and text.endswith("input x output add")
    graph = analyzer.symbolic_profile(graph, x)
    html = graph._repr_html_()
    text = shown(html)
    # five products of 4 rows, each 2 x 4 x 8 x 8 = 512 FLOPs; two ReLUs and the sum of 32 each
    assert "Forward FLOPs 2.66 K" in text and "float32[4, 8]" in text and graph.code not in html and "def " not in html
    total = list(graph.graph.nodes)[-1].meta["info"].accumulate_bytes
    assert f"Saved for backward {format_bytes(total)}" in text
    # three nodes under the checkpoint: two products and a ReLU; the last product is not run again
    assert "Run again 544 Backward" in text and "outside of regions 7" in text
    region = re.search(r"checkpoint \d+ 3 (.*?) Heaviest", text)
    assert region is not None and "1.06 K 544 " in region[1]
    assert "rest_0 and 1 alike Linear 0 B 256 B 1.02 K 0 " in text, "the same layers outside of the checkpoint"


def test_a_plan_is_judged_by_its_budget_and_drawn() -> None:
    # 100 and 60 bytes over four moments, a budget of 60, and half of 200 FLOPs run again
    before = StepInfo(100, 300, fwd_flops=200, memory=StepMemory((0, 50, 100, 40), (200,) * 4, ("fc",) * 4, 2, ()))
    after = StepInfo(60, 260, fwd_flops=200, recompute_flops=100,
                     memory=StepMemory((0, 60, 60), (200,) * 3, ("fc",) * 3, 2, ()))
    regions = tuple([PlanRegion((f"relu_{i}", "conv"), cost=float(i)) for i in range(30)])
    plan = Plan("Net <b>", 60, before, after, regions)
    text = shown(plan._repr_html_())
    assert text.startswith("Plan of Net <b>: checkpoints of operators, by method chain "
                           "Keeps within a budget of 60 B for activations: 60 B needed")
    assert "Activations without 100 B Activations with 60 B 60.0%" in text
    assert "Overhead 100 FLOP 50.0% of the forward pass Checkpoints 30 of 60 nodes" in text
    assert "30 checkpoints, the 20 most expensive" in text and "relu_29" in text and "relu_9 " not in text
    drawn = pixels(plan._repr_html_())
    ink = [int(read_colors()["temporary"][i:i + 2], 16) for i in (1, 3, 5)]
    level = numpy.flatnonzero((abs(drawn[..., :3] - ink).max(axis=-1) < 12).sum(axis=1) > drawn.shape[1] / 4)
    # the axis is from 9 % to 91 % of the height, and ends 8 % above the highest curve
    assert level.mean() / drawn.shape[0] == pytest.approx(0.09 + 0.82 * (1 - 60 / 108), abs=0.01)
    assert "Does NOT keep within a budget of 40 B" in shown(replace(plan, budget_bytes=40)._repr_html_())
    unchecked = shown(replace(plan, planned=None)._repr_html_())
    assert "Not checked against a budget of 60 B" in unchecked and "Overhead -" in unchecked
    whole = replace(plan, budget_of="step", budget_bytes=290, held_bytes=30)
    assert "Keeps within a budget of 290 B for the whole step: 290 B needed" in shown(whole._repr_html_())
    assert Plan.from_json(plan.to_json()) == plan


def test_other_results_are_a_sentence_and_a_table() -> None:
    found = analyzer.max_batch_size(nn.Linear(8, 8), lambda n: torch.empty(n, 8, device="meta"), mode="infer",
                                    device="t4", at_most=2)
    text = shown(found._repr_html_())
    assert text.startswith("batch size on t4 The largest batch size that fits is 2 or more: no larger size than 2")
    assert "Sizes that were tried (" in text
    fits = AdviceOption(("<i>",), fits=True, needed_bytes=2**33, step_seconds=0.5)
    advice = Advice("Net", "t4", 2**34, AdviceOption((), fits=False),
                    (fits, *[AdviceOption((str(i),)) for i in range(25)]), (("LoRA", "no <lib>"),))
    text = shown(advice._repr_html_())
    assert text.startswith("Net on t4 The one change with which it fits on t4: 1. <i>: 8.00 GiB needed")
    assert "7 more" in text and "Not tried (1) LoRA: no <lib>" in text, "the step as it is, 26 changes, 20 rows"
    row = RankRow(0, (RankRun(0, 3),), "stage <1>", 3, 12, 24, 2**30, 2**31, "forward", 0.5, 0)
    text = shown(RankTable(4, (row,), assumptions=("ranks are <alike>",))._repr_html_())
    assert text.startswith("A job of 4 ranks Most memory: rank 0 (stage <1>), 1.00 GiB allocated Slowest: rank 0 ")
    assert "0-3 stage <1> 3 1.00 GiB 2.00 GiB forward 500.00 ms" in text and text.endswith("ranks are <alike>")
    named = replace(row, kind="rank 0")
    assert "most memory: rank 0, 1.00 GiB allocated\nslowest: rank 0; the step" in RankTable(4, (named,)).render()
    assert "No figure of the ranks is known" in RankTable(4, ())._repr_html_()
