"""Pipelines joined: steps and bubbles as the papers derive them, waits for transfers by hand."""
import dataclasses
import math
from itertools import accumulate
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.parallel import PipelineAction, PipelineTimeline, StageAction, StageCost, join_timeline, list_actions

# A backward pass takes two forward passes, and each of its parts as long as one
EQUAL = StageCost(1.0, 2.0, backward_input=1.0, backward_weight=1.0)


def join(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1,
         cost: StageCost = EQUAL) -> PipelineTimeline:
    lists = list_actions(schedule, ranks, micro_batches, stages_per_rank)
    return join_timeline(lists, [cost] * (ranks * stages_per_rank))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "megatron_1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_bubble_of_one_stage_a_rank(schedule: str, ranks: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1): Narayanan et al. 2021, section 2.2.1, as a part of the whole step."""
    timeline = join(schedule, ranks, micro_batches)
    assert timeline.step_seconds == 3.0 * (micro_batches + ranks - 1)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_bubble_of_several_stages_a_rank(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """(p - 1) / (v m + p - 1), in chunks of a v-th of the rank's work: the same paper, section 2.2.2."""
    timeline = join(schedule, ranks, micro_batches, chunks)
    assert timeline.step_seconds == 3.0 * (chunks * micro_batches + ranks - 1)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_zero_bubble_waits_for_the_first_forward_passes_alone(schedule: str) -> None:
    """With F = I = W what is left is the way of the first micro-batch to the last rank: p - 1 forward passes of a chunk
    (Qi et al. 2024, sections 2 and 6).
    """
    timeline = join(schedule, ranks=4, micro_batches=8, stages_per_rank=2)
    assert timeline.step_seconds == 3.0 * 8 * 2 + 3


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "bubble", "most"), [
    ("VHalf", 2, 8, 1, 4), ("VHalf", 3, 8, 5, 4), ("VHalf", 4, 8, 5, 6), ("VHalf", 4, 16, 5, 6),
    ("VHalf", 5, 10, 11, 6), ("VHalf", 8, 16, 17, 10), ("VHalf", 16, 32, 41, 18),
    ("VMin", 2, 8, 3, 4), ("VMin", 3, 8, 5, 4), ("VMin", 4, 8, 11, 4), ("VMin", 5, 10, 15, 6), ("VMin", 8, 16, 27, 8)])
def test_v_schedules_hold_a_half_and_a_third(schedule: str, ranks: int, micro_batches: int, bubble: int,
                                             most: int) -> None:
    """Idle slots where F = I = W, as the implementation of their authors has them: at most a half and two thirds of the
    6 (p - 1) of 1F1B; and the activations of stages that a rank holds, of which 1F1B holds 2 p.
    """
    timeline = join(schedule, ranks, micro_batches, stages_per_rank=2)
    assert timeline.step_seconds == 6 * micro_batches + bubble
    assert bubble <= {"VHalf": 3, "VMin": 4}[schedule] * (ranks - 1)
    held = []
    for actions in list_actions(schedule, ranks, micro_batches, stages_per_rank=2):
        found = accumulate((a.kind == "forward") - (a.kind == "backward_weight") for a in actions)
        held.append(max(found))
    assert max(held) == most == {"VHalf": 2 * ((ranks + 2) // 2), "VMin": 2 * ((ranks + 4) // 3)}[schedule]


def test_a_schedule_may_be_a_file_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    lists = list_actions(str(path), 2, 2)
    assert [repr(a) for a in lists[1] if a.kind not in ("unshard", "reduce_grad")] == [
        "1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]
    with pytest.raises(InputError, match="the file has 2 rows, one for each rank"):
        list_actions(str(path), 4, 2)
    path.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(InputError, match="one.csv"):
        list_actions(str(path), 2, 1)
    with pytest.raises(InputError, match="No such file"):
        list_actions(str(tmp_path / "no.csv"), 2, 1)


def test_dual_pipe_runs_both_halves_of_its_overlapped_pairs_one_after_the_other() -> None:
    timeline = join("DualPipeV", ranks=2, micro_batches=4, stages_per_rank=2)
    assert [rank.compute_seconds for rank in timeline.ranks] == [3.0 * 4 * 2] * 2
    assert timeline.ranks[0].stages == (0, 3)


def test_every_schedule_does_all_the_work_once_and_its_seconds_add_up() -> None:
    cost = StageCost(1.0, 2.0, 0.75, 1.25, send_forward=0.25, send_backward=0.125, reduce_grad=0.5, optimizer=0.25)
    for schedule, chunks in [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("DualPipeV", 2),
                             ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("megatron_1f1b", 1)]:
        timeline = join(schedule, 4, 8, chunks, cost)
        for rank in timeline.ranks:
            assert rank.compute_seconds == 3.0 * 8 * chunks, schedule
            assert sum((rank.compute_seconds, rank.optimizer_seconds, rank.exposed_transfer_seconds,
                        rank.exposed_group_seconds, rank.bubble_seconds)) == pytest.approx(timeline.step_seconds)
            assert rank.exposed_transfer_seconds > 0


def test_a_transfer_on_the_way_is_waited_for() -> None:
    """One micro-batch through two ranks: 1 forward, 0.5 on the way, 1 + 2 on rank 1, 0.25 back, 2 backward."""
    timeline = join("1F1B", 2, 2, cost=StageCost(1.0, 2.0))
    slow = join_timeline(list_actions("GPipe", 2, 1), [StageCost(1.0, 2.0, send_forward=0.5, send_backward=0.25)] * 2)
    assert timeline.step_seconds == 9.0
    assert slow.step_seconds == 1 + 0.5 + 3 + 0.25 + 2
    first, last = slow.ranks
    assert (first.exposed_transfer_seconds, first.bubble_seconds) == (0.25, 0.5 + 3)
    assert (last.exposed_transfer_seconds, last.bubble_seconds) == (0.5 + 0.25, 1 + 2)
    assert [a for a in slow.actions if a.kind == "recv_forward"] == [
        StageAction(1, "recv_forward", 1, 0, 1.0, 1.5, peer=0)]


def test_megatron_waits_for_the_send_and_gpipe_does_not() -> None:
    """Rank 0 sends for a second after each forward pass of a second; GPipe runs the next one meanwhile."""
    costs = [StageCost(1.0, 0.0, send_forward=1.0), StageCost(0.0, 0.0)]
    assert join_timeline(list_actions("GPipe", 2, 3), costs).step_seconds == 1 + 3
    waiting = [[PipelineAction("forward", 0, i) for i in range(3)]]
    assert join_timeline(waiting, [StageCost(1.0, 0.0)]).step_seconds == 3
    assert join_timeline(list_actions("megatron_1f1b", 2, 3), costs).step_seconds == 6


def test_the_slowest_rank_and_what_comes_after_the_last_backward_pass() -> None:
    """Stage 1 computes twice as long; its gradients take 2, then ranks 0 and 1 share a second, then the update."""
    costs = [StageCost(1.0, 1.0, optimizer=0.5), StageCost(2.0, 2.0, reduce_grad=2.0, optimizer=1.0)]
    timeline = join_timeline(list_actions("1F1B", 2, 2), costs, shared=[("embedding", (0, 1), 1.0)])
    # 1, then 2 micro-batches of 4 on rank 1, then its gradients, as rank 0 ends its last backward pass
    assert timeline.step_seconds == 1 + 8 + 2 + 1 + 1
    assert (timeline.slowest_rank, timeline.imbalance) == (1, 8 / 6)
    first, last = timeline.ranks
    assert (last.exposed_group_seconds, last.optimizer_seconds, last.bubble_seconds) == (3.0, 1.0, 1.0)
    assert (first.exposed_group_seconds, first.compute_seconds, first.warmup_seconds) == (1.0, 4.0, 5.0)


def test_errors_of_one_family_go_together_and_those_of_two_do_not() -> None:
    """GPipe of one micro-batch: 6 seconds of computing, 3 of transfers, 4 of gradients and what is shared."""
    cost = StageCost(1.0, 2.0, send_forward=1.0, send_backward=2.0, reduce_grad=1.0)
    spread = dataclasses.replace(cost, compute_spread=0.1, transfer_spread=0.2, group_spread=0.5)
    shared = [("embedding", (0, 1), 3.0)]
    low, high = join_timeline(list_actions("GPipe", 2, 1), [spread] * 2, shared=shared).step_seconds_range or (0, 0)
    assert high == pytest.approx(13 + math.hypot(0.6, 0.6, 2.0))
    faster = [13 - 6 * (1 - 1 / 1.1), 13 - 3 * (1 - 1 / 1.2), 13 - 4 * (1 - 1 / 1.5)]
    assert low == pytest.approx(13 / (1 + math.hypot(*(13 / end - 1 for end in faster))))
    assert join_timeline(list_actions("GPipe", 2, 1), [cost] * 2).step_seconds_range is None
    known = dataclasses.replace(EQUAL, compute_spread=0.1)  # the others take no time
    assert join_timeline(list_actions("GPipe", 1, 1), [known]).step_seconds_range == pytest.approx((3 / 1.1, 3.3))
    uneven = dataclasses.replace(known, compute_spread_below=0.5)
    assert join_timeline(list_actions("GPipe", 1, 1), [uneven]).step_seconds_range == pytest.approx((2.0, 3.3))


def test_lists_of_computations_alone_take_transfers_as_latency() -> None:
    lists = [[PipelineAction("forward", 0, 0), PipelineAction("backward", 0, 0)],
             [PipelineAction("forward", 1, 0), PipelineAction("backward", 1, 0)]]
    costs = [StageCost(1.0, 2.0, send_forward=0.5), StageCost(1.0, 2.0, send_backward=0.25)]
    assert join_timeline(lists, costs).step_seconds == 6.75


def test_parts_of_a_backward_pass_that_are_not_known_are_an_assumption() -> None:
    timeline = join("ZBVZeroBubble", 2, 4, 2, StageCost(1.0, 2.0))
    assert timeline.assumptions == ("of a backward pass whose parts are not known, each takes half", )
    assert join("1F1B", 2, 4, 1, StageCost(1.0, 2.0)).assumptions == ()


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 waits until its send has arrived, rank 1 has its receive last: NCCL would hang."""
    rank0 = [PipelineAction("forward", 0, 0), PipelineAction("send_forward", 0, 0, waits=True),
             PipelineAction("recv_backward", 0, 0, waits=True), PipelineAction("backward", 0, 0)]
    late = [PipelineAction("forward", 1, 0), PipelineAction("backward", 1, 0),
            PipelineAction("send_backward", 1, 0, waits=True), PipelineAction("recv_forward", 1, 0)]
    with pytest.raises(InputError, match="ranks wait for each other: rank 0 at 0SEND_F0, rank 1 at 1F0"):
        join_timeline([rank0, late], [EQUAL] * 2)
    with pytest.raises(InputError, match=r"\('send_backward', 1, 0\) is on one list alone, as recv_backward"):
        join_timeline([rank0, [late[3], *late[:2]]], [EQUAL] * 2)


@pytest.mark.parametrize(("arguments", "said"), [
    (("1F1B", 4, 2, 1), "Number of microbatches"), (("Nothing", 2, 2, 1), "or megatron_1f1b"),
    (("1F1B", 2, 2, 2), "one stage a rank"),
    (("VHalf", 2, 2, 1), "two stages a rank"),
    (("GPipe", 0, 2, 1), "1 or more"), (("ZBVZeroBubble", 2, 2, 3), "exactly 2 stages")])
def test_what_a_schedule_cannot_run_is_an_input_error(arguments: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        list_actions(*arguments)


def test_seconds_and_stages_are_checked() -> None:
    with pytest.raises(InputError, match=r"StageCost\(backward=-1"):
        StageCost(1.0, -1)
    with pytest.raises(InputError, match="the costs are of 1 stages"):
        join_timeline(list_actions("1F1B", 2, 2), [EQUAL])


CHART = """\
step 9.00 s, 3 micro-batches, bubble 22.2 %, exposed transfers 0 %
imbalance 1.00, slowest rank 0
rank 0 00001111...aaaa222bbbb...cccc====
rank 1 ...0000aaaa1111bbb2222cccc====...
0-9 forward, a-j backward of a micro-
batch (its last digit; a is 0), w weight
gradient, + gradients and what stages
share, = update, . waiting

rank  stages  compute  update  transfers  collectives  bubble   share  warm-up
   0       0   6.00 s  1.00 s        0 s          0 s  2.00 s  22.2 %   3.00 s
   1       1   6.00 s  1.00 s        0 s          0 s  2.00 s  22.2 %   2.00 s
"""


def test_the_chart() -> None:
    timeline = join_timeline(list_actions("1F1B", 2, 3), [StageCost(1.0, 1.0, optimizer=1.0)] * 2)
    assert timeline.render(40) + "\n" == CHART
    assert max(map(len, join("1F1B", 8, 32).render().splitlines())) <= 120


def test_the_page_shows_what_is_printed() -> None:
    costs = [StageCost(forward=0.010, backward=0.020, send_forward=0.001, send_backward=0.001)] * 4
    text = join_timeline(list_actions("1F1B", ranks=4, micro_batches=8), costs).render()
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    assert text.partition("\n0-9 forward")[0] in page
