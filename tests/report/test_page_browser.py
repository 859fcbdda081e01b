"""Pages as a browser shows them: nothing fails, nothing is fetched, figures are those of the record, and one can look
around by mouse and keys.
"""
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import Profile, profile, symbolic_trace
from analyzer.parallel import RankTable, StageCost, join_timeline, list_actions
from analyzer.parallel.rank_row import describe_rank
from analyzer.report.page.document import unpack
from analyzer.results.lane import SpanInfo
from analyzer.tools.solver import Planner
from analyzer.tools.sweep import SweepResult
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


def check_look(page, draw_all, keep_shot, name):
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep_shot(page, name)


@pytest.fixture(scope="module")
def timeline():
    return join_timeline(list_actions("1F1B", 4, 8), [StageCost(0.01, 0.02, send_forward=0.001, optimizer=0.003)] * 4)


def test_a_pipeline_is_drawn_and_its_ranks_are_listed(show, draw_all, keep_shot, timeline):
    page = show(timeline, 800, "dark")
    check_look(page, draw_all, keep_shot, "pipeline_800_dark")
    told = page.inner_text(".verdict")
    for figure in (format_seconds(timeline.step_seconds), format_percent(timeline.bubble_share)):
        assert figure in told
    page.click(".pipeline th button:has-text('Bubble')")
    most = max(timeline.ranks, key=lambda rank: rank.bubble_seconds)
    assert page.inner_text(".pipeline tbody tr:not(.spacer) td:nth-child(7)") == format_seconds(most.bubble_seconds)
    page.select_option(".pipeline .controls select", "stage")
    page.wait_for_function("document.querySelector('.pipeline .chart').data[0].marker.color.length > 30")
    page.hover(".pipeline .barlayer .trace:first-child .point:nth-child(9) path", force=True)
    page.wait_for_selector(".pipeline .hoverlayer text")
    assert "micro-batch" in page.text_content(".pipeline .hoverlayer")


def test_ranks_are_listed_and_one_is_chosen(show, draw_all, keep_shot, timeline):
    profiles = {rank: profile(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4 - rank))),
                              (torch.empty(32, 64),), device="h100") for rank in range(2)}
    rows = tuple(describe_rank(found, rank, (rank,), f"stage {rank + 1} of 2") for rank, found in profiles.items())
    costs = [StageCost(0.01, 0.02)] * 2
    page = show(RankTable(2, rows, join_timeline(list_actions("1F1B", 2, 4), costs), profiles=profiles))
    check_look(page, draw_all, keep_shot, "ranks_1400_light")
    assert page.inner_text(".headline >> nth=0").startswith("Rank 0 (stage 1 of 2) decides: fits on h100")
    page.click(".ranks th button:has-text('Peak allocated')")
    assert page.inner_text(".ranks tbody tr:not(.spacer) td:nth-child(5)") == format_bytes(rows[0].peak_allocated_bytes)
    page.select_option(".ranks .controls select", "Parameters")
    page.wait_for_selector(".ranks .bartext:has-text('12.48 K')")  # (64 x 64 + 64) x 3
    assert page.is_visible("h2:has-text('Rank 0 (stage 1 of 2)')")
    page.select_option(".choice select", "rank 1 (stage 2 of 2)")
    assert not page.is_visible("h2:has-text('Rank 0 (stage 1 of 2)')")
    check_look(page, draw_all, keep_shot, "ranks_1400_light_second")
    tiles = page.inner_text("section[data-group='rank 1 (stage 2 of 2)'] .tiles >> nth=0")
    assert format_bytes(rows[1].peak_allocated_bytes) in tiles


def test_a_sweep_has_its_front_and_its_table(show, draw_all, keep_shot):
    def make(i):
        """Time and memory that trade off, with a scatter; every fifth does not fit, the last failed."""
        return {"target": "net", "batch": 2**(i % 4), "device": ("h100", "t4")[i // 4 % 2], "lora": str(i // 8),
                "fits": i % 5 != 0, "peak_reserved_bytes": 2**30 * (1 + i * 7 % 16),
                "step_seconds": 1 / (1 + i * 5 % 16),
                "error": "ValueError: <b>no</b>" if i == 15 else None}

    rows = [make(i) for i in range(16)]
    page = show(SweepResult(tuple(rows)), 800)
    check_look(page, draw_all, keep_shot, "sweep_800_light")

    def front(x, y):
        ok = [row for row in rows[:15] if row["fits"]]
        return [row for row in ok if not any(o[x] <= row[x] and o[y] <= row[y] and (o[x], o[y]) != (row[x], row[y])
                                             for o in ok)]

    expected = front("peak_reserved_bytes", "step_seconds")
    said = page.eval_on_selector_all(".sweep ol li", "items => items.map((item) => item.textContent)")
    assert len(said) == len(expected) > 1
    for line, row in zip(said, sorted(expected, key=lambda row: row["peak_reserved_bytes"])):
        assert line == (f"batch {row['batch']}, device {row['device']}, lora {row['lora']} "
                        f"{format_bytes(row['peak_reserved_bytes'])}, {format_seconds(row['step_seconds'])}")
    page.click(".sweep ol li button >> nth=0")
    assert page.inner_text(".sweep tr.active td:nth-child(1)") == said[0].split(",")[0].split()[1]
    page.select_option(".sweep .controls select >> nth=1", "Peak reserved")  # against itself: the least is the front
    page.wait_for_function("document.querySelectorAll('.sweep ol li').length === 1")
    page.fill(".sweep input[type=search]", "t4")
    assert page.inner_text(".sweep [role=status] >> nth=0") == "7 of 15 rows"  # 4 to 7 and 12 to 14
    assert page.inner_text(".failed tbody tr:not(.spacer) td:last-child") == "ValueError: <b>no</b>"


def test_a_plan_shows_what_it_keeps(show, draw_all, keep_shot):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    gm = symbolic_trace(model, meta_args={"input": torch.empty(512, 64)})
    planner = Planner(gm, (torch.empty(512, 64),))
    plan = replace(planner.solve(0.7), frontier=planner.frontier([1.0, 0.7]))
    page = show(plan, 1400, "dark")
    check_look(page, draw_all, keep_shot, "plan_1400_dark")
    assert format_bytes(plan.planned.peak_activation_bytes) in page.inner_text(".headline")
    legend = page.text_content(".plan_memory .legend")
    for name, step in (("without the plan", plan.unplanned), ("with the plan", plan.planned)):
        assert f"{name}: {format_bytes(step.peak_activation_bytes)}" in legend
    assert f"budget {format_bytes(plan.budget_bytes)}" in page.text_content(".plan_memory .chart")
    page.select_option(".plan_memory select", "whole")
    page.wait_for_selector(f".plan_memory .legend :text('with the plan: {format_bytes(plan.planned.peak_bytes)}')")
    before = sum(node.incremental_bytes for node in planner.profile.nodes)
    assert page.inner_text(".plan_kept tbody tr:not(.spacer) td:nth-child(2) >> nth=0") == format_bytes(before)
    page.focus(".plan_regions .grid")
    page.keyboard.press("End")
    assert page.inner_text(".plan_regions .body > div > div.note") == ", ".join(plan.regions[-1].nodes)
    assert page.inner_text(".frontier .grid tbody tr:not(.spacer) td:nth-child(2) >> nth=-1") == format_bytes(
        plan.frontier[-1].peak_bytes)
