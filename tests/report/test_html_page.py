"""The page stands alone, is well formed, escapes what it prints and draws the timeline."""
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from analyzer.report.html import draw_timeline
from analyzer.results.info import ModuleInfo, TimelinePoint

VOID = {"meta", "br"}
SCALE = 280 - 24 - 20  # drawing height of the timeline


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_well_formed_and_complete(mlp, tmp_path):
    text = mlp.to_html(tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text() == text
    page = Page(text)
    assert page.tags.count("tr") == 1 + len(mlp.nodes) + 1
    assert page.tags.count("details") == 2 and page.tags.count("svg") == 1
    for said in ("Net: one train step on h200", "Time (predicted for h200: models of kernels and host)",
                 "Accumulate size", "(own)", "ReLU (same as body.1)"):
        assert any(said in data for data in page.texts), said


def test_page_needs_nothing_else(mlp):
    text = mlp.to_html()
    assert not re.search(r"<(script|link|img|iframe|object)|https?:|src=|href=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_names_are_escaped(mlp):
    nasty = "<script>alert('&')</script>"
    profile = replace(mlp, name=nasty, assumptions=(nasty,), nodes=(replace(mlp.nodes[0], name=nasty),),
                      modules=ModuleInfo(path="", type=nasty), timeline=(TimelinePoint(nasty, 1, nasty),))
    text = profile.to_html()
    assert "<script" not in text
    assert "".join(Page(text).texts).count(nasty) >= 7  # title, heading, assumption, node, module, phase, peak


def test_unknown_profile(bare):
    page = "".join(Page(bare.to_html()).texts)
    assert "no memory timeline" in page and "no module tree" in page and "0 nodes" in page


def levels(path):
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]


def test_timeline_heights(mlp):
    svg = ElementTree.fromstring(draw_timeline(mlp.timeline).partition("<p>")[0])
    area, line, reserved = [path.get("d") for path in svg.iter("path")]
    # reserved, 2 MiB, is the top of the scale and flat
    assert levels(reserved) == [24.0] * 6
    assert levels(line) == pytest.approx([24 + SCALE * (1 - p.allocated_bytes / 2097152) for p in mlp.timeline],
                                         abs=0.06)
    assert area.startswith(line) and area.endswith("Z")
    assert next(svg.iter("title")).text == "peak 12.00 KiB at backward of fc2 in backward"
    assert [text.text
            for text in svg.iter("text")] == ["forward", "backward", "optimizer", "0 B", "1.00 MiB", "2.00 MiB"]


def test_unknown_reserved_is_a_gap_and_absent_is_no_line():
    points = [TimelinePoint("a", 1, None, 4), TimelinePoint("b", 2), TimelinePoint("c", 3, None, 4)]
    svg = ElementTree.fromstring(draw_timeline(points).partition("<p>")[0])
    assert [path.get("d").count("M") for path in svg.iter("path")] == [1, 1, 2]
    assert draw_timeline([TimelinePoint("a", 0)]).count("<path") == 2


def test_long_timeline_is_thinned_and_keeps_its_peaks():
    points = [TimelinePoint(i, i % 7, "forward" if i < 30_000 else "backward") for i in range(50_000)]
    points[12_345] = TimelinePoint("spike", 10_000, "forward")
    text = draw_timeline(points)
    svg = ElementTree.fromstring(text.partition("<p>")[0])
    line = [path.get("d") for path in svg.iter("path")][1]
    assert 1000 < len(levels(line)) <= 2002 and min(levels(line)) == 24.0
    assert "at spike in forward" in text and len(text) < 200_000
