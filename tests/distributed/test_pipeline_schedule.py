"""Every schedule of torch.distributed.pipelining runs as it is: what a rank holds, keeps and sends, derived by hand."""
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer.errors import InputError
from analyzer.parallel import list_actions, profile_ranks, read_schedule, world
from analyzer.parallel.pipeline_schedule import COMPUTE_KINDS

RANKS, BATCHES, ROWS, WIDTH = 4, 8, 4, 128
MESSAGE = ROWS * WIDTH * 4  # bytes between stages, a micro-batch
# Of each schedule, the stages of a rank.
SINGLE, LOOP, V = (lambda r: [r]), (lambda r: [r, r + RANKS]), (lambda r: [r, 2 * RANKS - 1 - r])
SCHEDULES = {"ScheduleGPipe": SINGLE, "Schedule1F1B": SINGLE, "ScheduleInterleaved1F1B": LOOP,
             "ScheduleLoopedBFS": LOOP, "ScheduleInterleavedZeroBubble": LOOP,
             "ScheduleZBVZeroBubble": V, "ScheduleDualPipeV": V, "VHalf": V, "VMin": V}


def load_schedule(name, stages):
    """One that torch has no class for, in the file that torch's schedules load."""
    made = schedules._PipelineScheduleRuntime(stages, BATCHES, loss_fn=lambda out, target: (out - target).pow(2).mean())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(write_v_schedule(name))
        made._load_csv(str(path))
        lists = list_actions(str(path), RANKS, BATCHES, 2)
    assert [str(action) for action in read_schedule(made, RANKS)] == [str(action) for action in lists]
    return made


def write_v_schedule(name):
    return "\n".join(",".join(str(action) for action in actions if action.kind in COMPUTE_KINDS)
                     for actions in list_actions(name, RANKS, BATCHES, 2))


def make_schedule(name, stages):
    if name in ("VHalf", "VMin"):
        return load_schedule(name, stages)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(schedules, name)(stages[0] if single else stages, BATCHES,
                                    loss_fn=lambda out, target: (out - target).pow(2).mean())


def pipeline(name, find_module, rank, **given):
    """What holds the stages of a rank, and their schedule."""
    places = SCHEDULES[name](rank)
    parts = nn.ModuleList([find_module(i) for i in places])
    count = RANKS * len(places)
    parts.schedule = make_schedule(name, [PipelineStage(part, i, count, torch.device("cuda"), **given)
                                          for part, i in zip(parts, places)])
    parts.is_first, parts.is_last = 0 in places, count - 1 in places
    return parts


def step(model, optimizer, x, target):
    model.schedule.step(*([x] if model.is_first else []), **({"target": target} if model.is_last else {}))
    optimizer.step()
    optimizer.zero_grad()


def small_stage(index=0):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()).cuda()


def run_small(name, **options):
    rows = torch.zeros(BATCHES * ROWS, WIDTH)
    return profile_ranks(lambda: pipeline(name, small_stage, torch.distributed.get_rank()), (rows, rows), size=RANKS,
                         step=step, optimizer="sgd", **options)


def exchanges_with_itself(name):
    """Torch 2.9 runs most schedules by a class that sends also from a stage of a rank to another of its own."""
    return torch.__version__ < (2, 10) and not issubclass(getattr(schedules, name), schedules._PipelineScheduleRuntime)


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_rank_sends_what_leaves_its_stages(name):
    """Shapes are told from stage to stage. Two stages of a rank that follow each other exchange nothing."""
    table = run_small(name)
    assert list(table.profiles) == list(range(RANKS))
    for rank, p in table.profiles.items():
        places = SCHEDULES[name](rank)
        last = RANKS * len(places) - 1
        own = [] if exchanges_with_itself(name) else places
        before = sum(i > 0 and i - 1 not in own for i in places)
        after = sum(i < last and i + 1 not in own for i in places)
        assert p.param_bytes == len(places) * WIDTH * WIDTH * 4
        sent = {(row.kind, row.phase): 0 for row in p.comm}
        for row in p.comm:
            sent[row.kind, row.phase] += row.bytes
        bytes_of = {("recv", "forward"): before, ("send", "forward"): after, ("recv", "backward"): after,
                    ("send", "backward"): before}
        assert sent == {key: n * BATCHES * MESSAGE for key, n in bytes_of.items() if n}
        assert p.fwd_macs == len(places) * BATCHES * ROWS * WIDTH * WIDTH


@pytest.mark.filterwarnings("ignore")
def test_a_rank_keeps_as_many_micro_batches_as_its_schedule_has_under_way():
    """Each keeps the output of its stage. A peak is in the second backward pass, when a gradient is added to the first:
    GPipe has run all 8 forward, of which 7 are left; 1F1B as many as there are stages from here on. In torch 2.9 a
    stage keeps the gradients of what it received until the next step: of each output that is gone, one more.
    """
    peaks = {name: [p.phases["backward"].peak_allocated_bytes for p in run_small(name).profiles.values()]
             for name in ("ScheduleGPipe", "Schedule1F1B")}
    saved = [a - b for a, b in zip(peaks["ScheduleGPipe"], peaks["Schedule1F1B"])]
    assert saved == [(BATCHES - 1 - (RANKS - rank)) * MESSAGE if rank == 0 or torch.__version__ >= (2, 10) else 0
                     for rank in range(RANKS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kept"), [("VHalf", 6), ("VMin", 4)])
def test_v_schedules_keep_what_their_paper_says(name, kept):
    """(p + 2) // 2 and (p + 4) // 3 micro-batches of p = 4 ranks, each of two stages. A stage keeps what goes into its
    GELU and what comes out, and less than one stage's worth is messages and what the backward pass makes.
    """
    wide = 32

    def find(index):
        return nn.Sequential(nn.Linear(WIDTH, wide * WIDTH, bias=False), nn.GELU(),
                             nn.Linear(wide * WIDTH, WIDTH, bias=False)).cuda()

    rows = torch.zeros(BATCHES * ROWS * wide, WIDTH)
    table = profile_ranks(lambda: pipeline(name, find, torch.distributed.get_rank()), (rows, rows), size=RANKS,
                          step=step, optimizer="sgd")
    stage = 2 * wide * wide * MESSAGE
    assert [p.peak_by_category["activation"] // stage for p in table.profiles.values()] == [kept] * RANKS


@pytest.mark.filterwarnings("ignore")
def test_stages_are_split_and_sharded_as_modules_are():
    """3 dimensions: a stage's first layer by columns, its second by rows, both over data parallel ranks."""
    def build():
        mesh = init_device_mesh("cuda", (RANKS, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        def find(index):
            part = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
            parallelize_module(part.cuda(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        return pipeline("Schedule1F1B", find, mesh["pp"].get_local_rank(), group=mesh["pp"].get_group())

    rows = torch.zeros(BATCHES * ROWS, WIDTH)
    table = profile_ranks(build, (rows, rows), size=4 * RANKS, step=step, optimizer="adamw")
    assert list(table.profiles) == [0, 4, 8, 12] and [row.ranks for row in table.rows][1] == (4, 5, 6, 7)
    p = table.profiles[4]
    assert p.param_bytes == 2 * WIDTH * WIDTH * 4 // 4
    totals = {(row.kind, row.group, row.phase): 0 for row in p.comm}
    for row in p.comm:
        totals[row.kind, row.group, row.phase] += row.bytes
    message, weights = BATCHES * MESSAGE, 2 * WIDTH * WIDTH * 4 // 2
    assert {key: n for key, n in totals.items() if key[1] != "pp"} == {
        ("all_gather", "dp", "forward"): weights, ("all_reduce", "tp", "forward"): message,
        ("all_reduce", "tp", "backward"): message, ("reduce_scatter", "dp", "backward"): weights}
    assert {key: n for key, n in totals.items() if key[1] == "pp"} == {
        (kind, "pp", phase): message for kind in ("send", "recv") for phase in ("forward", "backward")}


def test_a_model_that_is_split_by_tracing_is_an_error_that_says_what_to_do():
    with world(RANKS), pytest.raises(InputError, match="into stages by hand"):
        pipelining.pipeline(small_stage(), mb_args=(torch.zeros(ROWS, WIDTH, device="cuda"),))
