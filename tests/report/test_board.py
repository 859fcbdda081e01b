"""The data of the pages of pipelines, ranks, sweeps and plans: they add up to the figures of the record."""
from __future__ import annotations

import pytest

from analyzer.parallel import StageCost, join_timeline, list_actions
from analyzer.report.page.document import Part, build_page, choice_part, unpack


def facts(page, kind):
    """The data of the part of that kind."""
    return next(part["data"] for part in unpack(page) if part["kind"] == kind)


def test_of_groups_the_first_is_in_sight():
    parts = [choice_part("Rank", ["a", "<b>"]), Part("text", "Of a", group="a", has_chart=False),
             Part("text", "Of b", group="<b>", has_chart=False), Part("text", "Of all", has_chart=False)]
    page = build_page("Net", parts)
    assert '<section id="part-1" class="part text" aria-label="Of a" data-group="a">' in page
    assert '<section id="part-2" class="part text" aria-label="Of b" data-group="&lt;b&gt;" hidden>' in page
    assert '<a href="#part-2" data-group="&lt;b&gt;" hidden>' in page
    assert '<section id="part-3" class="part text" aria-label="Of all">' in page


# -- pipelines ---------------------------------------------------------------------------------------------------------

COST = StageCost(1.0, 2.0, 0.75, 1.25, send_forward=0.25, send_backward=0.125, reduce_grad=0.5, optimizer=0.25)


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("GPipe", 1), ("ZBVZeroBubble", 2)])
def test_lanes_of_a_pipeline_fill_each_ranks_step(schedule, chunks):
    timeline = join_timeline(list_actions(schedule, 4, 8, chunks), [COST] * 4 * chunks)
    data = facts(timeline.to_html(), "pipeline")
    spans, ranks = data["spans"], data["ranks"]
    sums = [dict.fromkeys({*spans["kind"]}, 0.0) for _ in timeline.ranks]
    for rank, kind, start, end in zip(spans["rank"], spans["kind"], spans["start"], spans["end"]):
        sums[rank][kind] += (end - start) / 1e12
    for rank, found in zip(timeline.ranks, sums):
        compute = sum(found.get(kind, 0.0) for kind in ("forward", "backward", "backward_input", "backward_weight"))
        assert (compute, found["optimizer"]) == (rank.compute_seconds, rank.optimizer_seconds)
        waits = rank.exposed_transfer_seconds + rank.exposed_group_seconds + rank.bubble_seconds
        assert found["wait"] == pytest.approx(waits)
        assert compute + found["optimizer"] + found["wait"] == pytest.approx(timeline.step_seconds)
    for phases in zip(ranks["warmup_seconds"], ranks["steady_seconds"], ranks["cooldown_seconds"]):
        assert sum(phases) == pytest.approx(timeline.step_seconds)


def test_phases_of_a_pipeline_by_hand():
    """1F1B of 2 ranks and 2 micro-batches, forward 1 s and backward 2 s: rank 0 runs F0 0-1, F1 1-2, B0 4-6, B1 7-9;
    rank 1 F0 1-2, B0 2-4, F1 4-5, B1 5-7.
    """
    timeline = join_timeline(list_actions("1F1B", 2, 2), [StageCost(1.0, 2.0)] * 2)
    ranks = facts(timeline.to_html(), "pipeline")["ranks"]
    assert ranks["warmup_seconds"] == [4.0, 2.0]
    assert ranks["cooldown_seconds"] == [5.0, 4.0]
    assert ranks["steady_seconds"] == [0.0, 3.0]
