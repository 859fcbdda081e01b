"""The pages of pipelines, ranks, sweeps and plans as a browser shows them."""
from __future__ import annotations

import pytest

from analyzer.parallel import StageCost, join_timeline, list_actions
from analyzer.units import format_percent, format_seconds


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
