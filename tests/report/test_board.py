"""The data of the pages of pipelines, ranks, sweeps and plans: they add up to the figures of the record."""
from dataclasses import replace

import pytest

from analyzer.cli import main
from analyzer.parallel import RankTable, StageCost, join_timeline, list_actions
from analyzer.parallel import pipeline_page as rank_page_module
from analyzer.parallel.rank_row import describe_rank
from analyzer.report.page.document import Panel, build_page, choice_part, unpack
from analyzer.tools.solver import FrontierPoint, Plan, PlanRegion, SavedBytes, StepInfo, StepMemory
from analyzer.tools.sweep import SweepResult

from .conftest import facts


def kinds(page):
    return [part["kind"] for part in unpack(page)]


def test_of_groups_the_first_is_in_sight():
    parts = [choice_part("Rank", ["a", "<b>"]), Panel("text", "Of a", group="a", has_chart=False),
             Panel("text", "Of b", group="<b>", has_chart=False), Panel("text", "Of all", has_chart=False)]
    page = build_page("Net", parts)
    assert '<section id="part-1" class="part text" aria-label="Of a" data-group="a">' in page
    assert '<section id="part-2" class="part text" aria-label="Of b" data-group="&lt;b&gt;" hidden>' in page
    assert 'href="#part-2"' not in page and 'href="#part-3"' in page
    assert '<section id="part-3" class="part text" aria-label="Of all">' in page


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


@pytest.mark.parametrize("command", [
    ("dryrun", "--world", "2", "SCRIPT"), ("sweep", "SCRIPT:no_model", "--batch", "1"),
    ("plan", "SCRIPT:no_model", "--budget", "50%")])
def test_a_page_without_plotly_is_refused_before_any_work(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr("analyzer.report.page.document.find_spec", lambda name: None)
    script = tmp_path / "train.py"
    script.write_text("open('was_run', 'w')")
    monkeypatch.chdir(tmp_path)
    argv = [word.replace("SCRIPT", str(script)) for word in command]
    assert main([*argv, "--html", "page.html"]) == 2
    assert "'page.html': a page draws its charts with plotly" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.fixture
def table(mlp):
    """A pipeline of two stages with two data-parallel ranks each; the second stage holds 1,024 bytes less."""
    less = replace(mlp, peak_allocated_bytes=mlp.peak_allocated_bytes - 1024,
                   peak_by_category={**mlp.peak_by_category, "activations": 512}, step_seconds=16e-6,
                   timeline=mlp.timeline[:3])
    rows = describe_rank(mlp, 0, (0, 1), "stage 1 of 2"), describe_rank(less, 2, (2, 3), "stage 2 of 2")
    timeline = join_timeline(list_actions("1F1B", 2, 4), [StageCost(1e-6, 2e-6), StageCost(2e-6, 3e-6)])
    return RankTable(4, rows, timeline, ("equal parts", ), {0: mlp, 2: less})


def test_ranks_are_those_of_the_table(table):
    page = table.to_html()
    assert kinds(page)[:6] == ["verdict", "ranks", "rank_memory", "pipeline", "text", "choice"]
    assert "Rank 0 (stage 1 of 2) decides: fits on h200" in page and "equal parts" in page
    ranks = facts(page, "ranks")
    found = {q["title"]: q["values"] for q in ranks["quantities"]}
    fields = {"Peak allocated": "peak_allocated_bytes", "Peak reserved": "peak_reserved_bytes", "Step": "step_seconds",
              "Parameters": "params", "Parameter size": "param_bytes", "Optimizer states": "optimizer_bytes",
              "Sent and received": "comm_bytes"}
    assert found == {title: [getattr(row, field) for row in table.rows] for title, field in fields.items()}
    assert [sum(parts) for parts in zip(*ranks["categories"].values())] == found["Peak allocated"]
    assert (ranks["ranks"], ranks["alike"], ranks["deciding"], ranks["slowest"]) == (["0-1", "2-3"], [2, 2], 0, 1)
    curves = facts(page, "rank_memory")["curves"]
    assert [curve["allocated"] for curve in curves] == [
        [point.allocated_bytes for point in profile.timeline] for profile in table.profiles.values()]
    assert facts(page, "pipeline")["names"] == ["rank 0 (stage 1 of 2)", "rank 2 (stage 2 of 2)"]


def test_the_rank_that_decides_is_in_sight_and_others_as_the_file_stays_small(table, monkeypatch, out_of_memory):
    assert facts(table.to_html(), "choice")["groups"] == ["rank 0 (stage 1 of 2)", "rank 2 (stage 2 of 2)"]
    monkeypatch.setattr(rank_page_module, "_MOST_PACKED", 10)
    choice = facts(table.to_html(), "choice")
    assert choice["groups"] == ["rank 0 (stage 1 of 2)"] and choice["note"].startswith("1 more would make")
    short = replace(table, profiles={**table.profiles, 2: replace(table.profiles[2], out_of_memory=out_of_memory)})
    assert facts(short.to_html(), "choice")["groups"] == ["rank 2 (stage 2 of 2)"]
    assert '">Rank 2 (stage 2 of 2) decides: ' in short.to_html()


def test_what_is_not_known_of_ranks_has_no_part(table, bare):
    page = RankTable(8, (describe_rank(bare, 0, (0, ), "each"), ), profiles={0: bare}).to_html()
    assert kinds(page) == ["verdict", "ranks", "text", "verdict", "text"]
    assert "Which of 8 ranks needs most memory is not known" in page
    assert (facts(page, "ranks")["quantities"], facts(page, "ranks")["categories"]) == ([], {})
    saved = RankTable.from_dict(table.to_dict())  # without the profiles
    assert kinds(saved.to_html()) == ["verdict", "ranks", "pipeline", "text"]
    assert facts(saved.to_html(), "ranks")["categories"] == {}


def test_a_sweep_by_hand():
    """Three configurations of two batches on two devices have figures, one failed."""
    same = {"target": "net", "optimizer": "sgd"}
    rows = ({**same, "batch": 8, "device": "t4", "fits": False, "peak_reserved_bytes": 8, "step_seconds": 4.0,
             "samples_per_second": 2.0},
            {**same, "batch": 16, "device": "h100", "fits": True, "peak_reserved_bytes": 12, "step_seconds": 2.0,
             "samples_per_second": 8.0},
            {**same, "batch": 16, "device": "t4", "error": "ValueError: <no>"},
            {**same, "batch": 8, "device": "h100", "fits": None, "peak_reserved_bytes": 6, "step_seconds": None})
    page = SweepResult(rows).to_html()
    assert kinds(page) == ["verdict", "sweep", "failed"]
    assert "1 of 4 configurations fit their device" in page and "batch 16, device h100" in page
    found = facts(page, "sweep")
    assert found["dimensions"] == [{"title": "batch", "values": ["8", "16", "8"], "order": ["8", "16"]},
                                   {"title": "device", "values": ["t4", "h100", "h100"], "order": ["h100", "t4"]}]
    assert found["fits"] == ["no", "yes", "unknown"]
    quantities = {q["title"]: (q["values"], q["more"]) for q in found["quantities"]}
    assert quantities == {"Peak reserved": ([8, 12, 6], False), "Step": ([4.0, 2.0, None], False),
                          "Samples a second": ([2.0, 8.0, None], True), "Time a sample": ([0.5, 0.125, None], False)}
    assert (found["x"], found["y"]) == ("Peak reserved", "Time a sample")  # steps of 8 and of 16 samples
    failed = facts(page, "failed")
    assert failed["error"] == ["ValueError: <no>"]
    assert {d["title"]: d["values"] for d in failed["dimensions"]} == {
        "target": ["net"], "batch": ["16"], "optimizer": ["sgd"], "device": ["t4"]}


@pytest.mark.parametrize(("rows", "parts"), [
    ([], ["verdict"]), ([{"batch": 1, "error": "E"}], ["verdict", "failed"]),
    ([{"batch": 1, "peak_reserved_bytes": 3}], ["verdict"]),  # one quantity alone
    ([{"batch": 1, "peak_reserved_bytes": 3, "step_seconds": 1.0}], ["verdict", "sweep"])])
def test_a_sweep_of_which_little_is_known_has_fewer_parts(rows, parts):
    assert kinds(SweepResult(tuple(rows)).to_html()) == parts


def test_what_is_not_known_to_fit_is_not_told_to_fail():
    rows = [{"batch": n, "peak_reserved_bytes": n, "step_seconds": 1.0, "fits": None} for n in (1, 2, 3)]
    assert "Which of 3 configurations fit their device is not known" in SweepResult(tuple(rows)).to_html()
    one = SweepResult((*rows, {"batch": 4, "peak_reserved_bytes": 4, "fits": True})).to_html()
    assert "1 of 4 configurations fit their device; of 3 it is not known" in one


def test_a_plan_by_hand():
    """Blocks of two saved results of 8 bytes each; the plan runs block 1 again and keeps what it reads."""
    saved = [SavedBytes(f"blocks_{i}_{name}", f"blocks.{i}.{name}", 8) for i in (0, 1, 10) for name in ("up", "act")]
    saved.append(SavedBytes("x", "", 4))
    before = StepInfo(60, 160, fwd_flops=200, memory=StepMemory((10, 60, 30), (100, 100, 90), ("up", "act", "act"), 2,
                                                                tuple(saved)))
    after = StepInfo(44, 144, fwd_flops=200, recompute_flops=50, memory=StepMemory(
        (10, 44, 40, 30), (100, 100, 100, 90), ("up", "act", "up", "act"), 2,
        tuple(entry for entry in saved if "blocks_1_" not in entry.node)))
    regions = (PlanRegion(("blocks_1_up", "blocks_1_act"), keeps=(0,), products=1, cost=50.0), )
    frontier = FrontierPoint(60, 60, 0, 0), FrontierPoint(50, 44, 50, 50)
    plan = Plan("net", 50, before, after, regions, frontier=frontier)
    assert Plan.from_json(plan.to_json()) == plan
    page = plan.to_html()
    assert kinds(page) == ["verdict", "plan_memory", "plan_kept", "frontier", "plan_regions", "text"]
    assert "Keeps within a budget of 50 B for activations: 44 B needed" in page
    memory = facts(page, "plan_memory")
    assert (memory["budget"], memory["budget_of"]) == (50, "activations")
    assert memory["without"] == {"activations": [10, 60, 30], "others": [100, 100, 90], "names": ["up", "act"],
                                 "node": [0, 1, 1], "forward": 2}
    assert memory["with"]["activations"] == [10, 44, 40, 30]
    kept = facts(page, "plan_kept")
    rows = dict(zip(kept["path"], zip(kept["depth"], kept["before"], kept["after"], kept["checkpointed"])))
    assert kept["path"][:6] == ["", "blocks", "blocks.0", "blocks.0.act", "blocks.0.up", "blocks.1"]
    assert kept["path"][-3] == "blocks.10"  # after 1, as numbers
    assert rows[""] == (0, 52, 36, 2) and rows["blocks"] == (1, 48, 32, 2)
    assert rows["blocks.0"] == (2, 16, 16, 0) and rows["blocks.1"] == (2, 16, 0, 2)
    frontier = facts(page, "frontier")
    assert (frontier["peak"], frontier["overhead"], frontier["whole"]) == ([60, 44], [0, 50], 200)
    assert frontier["own"] == {"peak": 44, "overhead": 50}
    assert facts(page, "plan_regions") == {
        "unit": "flops", "first": ["blocks_1_up"], "last": ["blocks_1_act"],
        "nodes": [["blocks_1_up", "blocks_1_act"]], "kept": [1], "products": [1], "cost": [50.0]}


@pytest.mark.parametrize(("plan", "parts"), [
    (Plan("net", 5, StepInfo(4, 4)), ["verdict", "text"]),
    (Plan("net", 5, StepInfo(4, 4), regions=(PlanRegion(("a", "b")), )), ["verdict", "plan_regions", "text"]),
    (Plan("net", 5, StepInfo(4, 4, memory=StepMemory((4, ), (0, ), ("a", ), 1, ()))),
     ["verdict", "plan_memory", "text"])])
def test_a_plan_of_which_little_is_known_has_fewer_parts(plan, parts):
    assert kinds(plan.to_html()) == parts
