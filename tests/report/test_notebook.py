"""What an interactive session shows of each result: short, and what is asked first."""
from __future__ import annotations

import base64
import io
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

import analyzer
from analyzer import FitTable, Profile, Verdict
from analyzer.report.page.picture import draw_memory, read_colors
from analyzer.results.info import MemoryEvent, ModuleInfo, TimelinePoint
from analyzer.units import format_bytes

VERDICT = Verdict(device="t4", fits=False, needed_bytes=20 * 2**30, capacity_bytes=15 * 2**30, free_bytes=-5 * 2**30,
                  phase="backward", operator="aten.mm.default", devices=("l4",))
FITS = FitTable("Net <b>: one train step", (VERDICT, Verdict(device="l4", fits=True, needed_bytes=20 * 2**30)))


class Balance(HTMLParser):
    """Opens as many elements as it closes, and nests them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def shown(html: str) -> str:
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    return " ".join(" ".join(parser.text).split())


def test_a_verdict_is_a_line() -> None:
    assert repr(VERDICT) == "Verdict(does NOT fit on t4: 20.00 GiB needed, 15.00 GiB there, 5.00 GiB short)"
    assert shown(VERDICT._repr_html_()) == " ".join(str(VERDICT).split()) and "would fit on l4" in str(VERDICT)


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
           "text-align", "vertical-align", "width"}


def test_what_is_shown_needs_no_script_and_no_style_sheet(profile: Profile) -> None:
    nasty = replace(profile, name="<script>", assumptions=("<i>", *("more" for _ in range(30))))
    html = nasty._repr_html_()
    assert "<i>" not in html and "&lt;script&gt;" in html and "Taken for granted (31)" in html
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
    assert "the picture of memory: matplotlib is not installed; pip install 'torch-analyzer[report]'" in shown(html)


def test_modules_are_a_line_each(profile: Profile) -> None:
    assert profile.modules is not None
    assert re.fullmatch(r"ModuleInfo\(path='', type='Sequential', params=28800, fwd_flops=\d+, bwd_flops=\d+, "
                        r"children=200\)", repr(profile.modules))


def test_the_largest_batch_is_a_line() -> None:
    found = analyzer.max_batch_size(nn.Linear(8, 8), lambda n: torch.empty(n, 8, device="meta"), mode="infer",
                                    device="t4", at_most=2)
    assert repr(found) == (
        "FitResult(t4: the largest batch size that fits is 2 or more: no larger one than 2 was asked for)")
