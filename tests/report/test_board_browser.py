"""The pages of pipelines, ranks, sweeps and plans as a browser shows them."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_trace
from analyzer.parallel import RankTable, StageCost, join_timeline, list_actions
from analyzer.parallel.rank_row import describe_rank
from analyzer.tools.solver import Planner
from analyzer.tools.sweep import SweepResult
from analyzer.units import format_bytes, format_percent, format_seconds


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
