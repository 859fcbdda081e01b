"""Pages as a browser shows them: nothing fails, nothing is fetched, figures are the profile's, and one can look around
by mouse and keys.
"""
from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.report.page.document import unpack
from analyzer.results.lane import SpanInfo
from analyzer.units import format_bytes, format_count, format_percent, format_seconds


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth=12):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def net():
    return profile(Net(), args=(torch.empty(8, 32, 64),), optimizer="adamw", device="h100")


LOOKS = [(1400, "light"), (800, "dark"),
         *([(1400, "dark"), (800, "light")] if os.environ.get("ANALYZER_SCREENSHOTS") else [])]


@pytest.mark.parametrize("width, scheme", LOOKS)
def test_every_part_is_drawn_and_nothing_is_wider_than_the_window(show, draw_all, keep_shot, net, width, scheme):
    page = show(net, width, scheme)
    draw_all(page)
    for kind in ("memory", "lanes", "modules", "roofline"):
        assert page.query_selector(f".{kind} .main-svg"), kind
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    keep_shot(page, f"page_{width}_{scheme}")


def test_first_screen_says_what_the_profile_says(show, net):
    page = show(net)
    told = page.inner_text(".verdict")
    assert told.splitlines()[0] == str(net.verdict).splitlines()[0].capitalize().replace("H100", "h100").replace(
        "gib", "GiB").replace("mib", "MiB")
    for figure in (format_bytes(net.peak_allocated_bytes), format_seconds(net.step_seconds), format_percent(net.mfu()),
                   format_count(net.params), format_count(net.hardware_flops)):
        assert figure in told
    assert page.inner_text(".memory .panel h3") == f"{format_bytes(net.peak_allocated_bytes)} held at the peak"


def shown_sizes(page):
    return page.eval_on_selector_all(".holders li", "items => items.map(item => item.title)")


def test_a_moment_is_chosen_by_click_and_by_keys(show, net):
    page = show(net)
    blocks = unpack(net.to_html())[1]["data"]["blocks"]

    def held_at(moment):
        rows = zip(blocks["bytes"], blocks["born"], blocks["freed"])
        return sum(n for n, born, freed in rows if born <= moment < freed)

    peak = [p.allocated_bytes for p in net.timeline].index(net.peak_allocated_bytes)
    page.focus(".memory .chart")
    page.keyboard.press("ArrowRight")
    chosen = net.timeline[peak + 1]
    assert page.inner_text(".memory .panel h3") == f"{format_bytes(chosen.allocated_bytes)} held"
    page.select_option(".memory .controls select", "category")  # few: all are listed
    sizes = [int(title.split(" bytes")[0].replace(",", "")) for title in shown_sizes(page)]
    assert sum(sizes) == held_at(peak + 1) == chosen.allocated_bytes
    box = page.query_selector(".memory .nsewdrag").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.9)
    page.wait_for_function("!document.querySelector('.memory .panel p').textContent.startsWith('backward')")
    page.click("text=Go to the peak")
    assert page.inner_text(".memory .panel h3").endswith("at the peak")


def test_hover_names_operator_module_bytes_and_source(show, net):
    page = show(net)
    box = page.query_selector(".memory .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.8)
    page.wait_for_selector(".memory .hoverlayer text")
    told = page.text_content(".memory .hoverlayer")
    for said in ("allocated", "operator", "module blocks.", "test_page_browser.py:"):
        assert said in told, told


def test_nodes_sort_filter_and_move_by_keys(show, draw_all, net):
    page = show(net)
    draw_all(page)
    column = [node.fwd_flops for node in net.nodes]
    page.click(".nodes th button:has-text('Fwd FLOPs')")
    first = page.inner_text(".nodes tbody tr:not(.spacer) td:nth-child(9)")
    assert first == format_count(max(column))
    page.fill(".nodes input[type=search]", "Fwd FLOPs > 1000000")
    more = sum(flops is not None and flops > 1_000_000 for flops in column)
    assert page.inner_text(".nodes .controls [role=status]") == f"{more} of {len(column)} rows"
    page.fill(".nodes input[type=search]", "blocks_3_")
    named = sum("blocks_3_" in node.name or "blocks_3_" in node.module_path for node in net.nodes)
    assert page.inner_text(".nodes .controls [role=status]") == f"{named} of {len(column)} rows"
    page.focus(".nodes .grid")
    page.keyboard.press("End")
    assert "blocks_3_" in page.inner_text(".nodes tr.active")
    assert "module blocks.3" in page.inner_text(".nodes .body > div > div.note")


def test_modules_drill_down_and_search(show, draw_all, net):
    page = show(net)
    draw_all(page)
    page.fill(".modules input[type=search]", "blocks.7")
    page.keyboard.press("Enter")
    page.wait_for_selector(".crumbs button[aria-current]:has-text('7 (Block)')")
    labels = page.text_content(".modules .chart")
    assert "up (Linear)" in labels and "6 (Block)" not in labels
    page.click(".crumbs button:first-child")
    page.wait_for_selector(".crumbs button[aria-current]:has-text('Net')")
    page.select_option(".modules .controls select >> nth=1", "treemap")
    page.wait_for_selector(".modules .treemaplayer")


def test_what_a_file_names_a_span_is_never_markup(show):
    """The file of a saved profile can hold any name of an operator."""
    name = """<img src=x onerror="document.title='run'">"""
    page = show(Profile(name="Net", mode="train", device="h100", spans=(
        SpanInfo("compute", name, "fc", name, "fc", "", "forward", 0.0, 1.0),)))
    box = page.query_selector(".lanes .nsewdrag").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".lanes p[role=status]:has-text('begins at')")
    assert page.inner_text(".lanes p[role=status]") == f"fc 1.00 s, {name}, begins at 0 s, {name}"
    assert page.query_selector(".lanes img") is None and page.title() == "Net: one train step on h100"


def test_figures_are_printed_as_the_package_prints_them(show, net):
    page = show(net)
    sizes = [0, 1, 512, 1023, 1024, 1048575, 1048576, 3_141_592_653, 2**50]
    assert page.evaluate("values => values.map(v => format(v, 'bytes'))", sizes) == [format_bytes(v) for v in sizes]
    assert page.evaluate("values => values.map(v => format(v, 'count'))", sizes) == [format_count(v) for v in sizes]
    times = [0, 3e-9, 4.2e-6, 0.00123, 0.0009999999, 75.3]
    assert page.evaluate("values => values.map(v => format(v, 'seconds'))", times) == [format_seconds(v) for v in times]
    shares = [0, 1e-6, 0.00123, 0.4137, 1]
    assert page.evaluate("values => values.map(v => format(v, 'share'))", shares) == [format_percent(v) for v in shares]
    assert page.evaluate("format(null, 'bytes')") == "-"
