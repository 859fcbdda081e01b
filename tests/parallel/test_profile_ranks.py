"""Ranks of one job, each run in a world of its own."""
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer.errors import InputError
from analyzer.parallel import RankTable, profile_ranks

WIDTH, TOKENS, VOCAB, SAMPLES, MICRO_BATCHES = 64, 32, 100, 2, 4
LAYER = WIDTH * WIDTH + WIDTH


class Part(nn.Module):
    """A stage: two layers, the first with an embedding, the last with a head."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH) if stage == 0 else None
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x + self.layers(x)  # no view, which the zero-bubble schedules of torch could not detach in place
        return x if self.head is None else self.head(x)


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


class Pipeline(nn.Module):
    """What one rank of a pipeline of four, beside two data-parallel ranks, holds, and its step."""

    def __init__(self, schedule: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        super().__init__()
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("pp", "dp"))["pp"]
        rank, cls = mesh.get_local_rank(), get_schedule_class(schedule)
        self.numbers = [rank] if schedule == "1F1B" else [rank, 7 - rank if "V" in schedule else rank + 4]
        self.count = 4 * len(self.numbers)
        self.parts = nn.ModuleList(Part(i, self.count).cuda() for i in self.numbers)
        stages = [PipelineStage(part, i, self.count, torch.device("cuda"), group=mesh.get_group())
                  for i, part in zip(self.numbers, self.parts)]
        made: Any = cls
        self.schedule = [made(stages[0] if schedule == "1F1B" else stages, MICRO_BATCHES, loss_fn=loss)]

    def step(self, ids: torch.Tensor) -> None:
        args = (ids, ) if 0 in self.numbers else ()
        last = {"target": ids, "losses": []} if self.count - 1 in self.numbers else {}
        self.schedule[0].step(*args, **last)


def run(schedule: str, **options: Any) -> RankTable:
    def step(model: Pipeline, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        model.step(ids)
        optimizer.step()
        optimizer.zero_grad()

    def ids() -> tuple[torch.Tensor]:
        return (torch.zeros(SAMPLES * MICRO_BATCHES, TOKENS, dtype=torch.int64, device="cuda"), )

    return profile_ranks(lambda: Pipeline(schedule), ids, size=8, cluster="dgx_a100", device="a100_80gb", step=step,
                         optimizer="sgd", **options)


def test_stages_are_run_and_data_parallel_ranks_are_alike() -> None:
    table = run("1F1B")
    assert [(row.kind, row.ranks, row.params) for row in table.rows] == [
        ("stage 1 of 4", (0, 1), VOCAB * WIDTH + 2 * LAYER), ("stage 2 of 4", (2, 3), 2 * LAYER),
        ("stage 3 of 4", (4, 5), 2 * LAYER), ("stage 4 of 4", (6, 7), 2 * LAYER + WIDTH * VOCAB + VOCAB)]
    # 4, 3, 2 and 1 micro-batches are under way at once: of stages that hold the same, the earlier one has more
    peaks = [row.peak_allocated_bytes for row in table.rows]
    assert peaks[1] is not None and peaks[2] is not None and peaks[1] > peaks[2]
    hidden = SAMPLES * TOKENS * WIDTH * 4
    assert [row.comm_bytes for row in table.rows] == [2 * MICRO_BATCHES * hidden, *[4 * MICRO_BATCHES * hidden] * 2,
                                                      2 * MICRO_BATCHES * hidden]
    timeline = table.timeline
    assert timeline is not None and table.step_seconds == timeline.step_seconds
    assert all(table.step_seconds > (row.step_seconds or 0) for row in table.rows)
    # the last stage computes longest: all its micro-batches, after one forward and before one backward of the others
    assert table.slowest == table.rows[3]
    *others, last = [rank.compute_seconds for rank in timeline.ranks]
    waits = timeline.ranks[3].exposed_transfer_seconds + timeline.ranks[0].optimizer_seconds
    assert timeline.step_seconds == pytest.approx(last + sum(others) / MICRO_BATCHES + waits, rel=0.01)
    low, high = table.step_seconds_range or (0.0, 0.0)  # messages between stages have a range too
    assert 0 < low < timeline.step_seconds < high and timeline.step_seconds_range == (low, high)
    assert "the step takes" in table.render().splitlines()[-1] and " to " in table.render().splitlines()[-1]
    assert RankTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_shapes_reach_the_stages_of_a_v() -> None:
    """Rank 0 has the first and the last stage: it is run again when the others have told the last one its shapes."""
    table = run("ZBVZeroBubble")
    assert [row.kind for row in table.rows] == [f"stage {1 + i}+{8 - i} of 8" for i in range(4)]
    assert table.timeline is not None and table.timeline.assumptions
    assert "equally long" in table.assumptions[0]


def test_ranks_that_are_named_are_run_alone() -> None:
    table = run("1F1B", ranks=[0])
    assert [row.ranks for row in table.rows] == [(0, )]
    assert table.timeline is None and table.step_seconds is not None
    assert table.assumptions == ("not every stage of the pipeline was run: the step of the job is not known",
                                 "7 of 8 ranks were not run and are in no row")


def test_a_stage_that_nobody_tells_its_shapes_is_an_error() -> None:
    with pytest.raises(InputError, match="pipeline stage 1 receives what stage 0 passes on"):
        run("1F1B", ranks=[2])


def test_ranks_of_a_ring_exchange_messages_and_are_alike() -> None:
    import torch.distributed as dist

    def pass_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        out, received = model(x), torch.empty_like(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % size),
                                            dist.P2POp(dist.irecv, received, (rank - 1) % size)]):
            work.wait()
        (out * received).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    table = profile_ranks(lambda: nn.Linear(64, 64).cuda(), lambda: (torch.rand(4, 64, device="cuda"), ), size=4,
                          step=pass_on, optimizer="sgd", device="h100")
    assert [(row.kind, row.ranks) for row in table.rows] == [("each", (0, 1, 2, 3))]
    assert sorted(table.profiles) == [0, 1, 2, 3]
