"""Every schedule of torch.distributed.pipelining runs as it is: what a rank holds, keeps and sends, derived by hand."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.parallel import profile_ranks, world
from analyzer.zoo.llama import DecoderLayer, LlamaConfig, RMSNorm, rotary_angles

RANKS, BATCHES, ROWS, WIDTH = 4, 8, 4, 128
MESSAGE = ROWS * WIDTH * 4  # bytes between stages, a micro-batch
# Of each schedule, the stages of a rank.
SINGLE, LOOP, V = (lambda r: [r]), (lambda r: [r, r + RANKS]), (lambda r: [r, 2 * RANKS - 1 - r])
SCHEDULES = {"ScheduleGPipe": SINGLE, "Schedule1F1B": SINGLE, "ScheduleInterleaved1F1B": LOOP,
             "ScheduleLoopedBFS": LOOP, "ScheduleInterleavedZeroBubble": LOOP,
             "ScheduleZBVZeroBubble": V, "ScheduleDualPipeV": V}
ONE_STEP = ProfileOptions(steps=1)


def make_schedule(name, stages):
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


CONFIG = LlamaConfig(tie_word_embeddings=False)


class LlamaStage(nn.Module):
    """Equal parts of the 16 layers; the first has the embedding, the last norm and head."""

    def __init__(self, index, count):
        super().__init__()
        self.embed = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size) if index == 0 else None
        self.layers = nn.ModuleList(DecoderLayer(CONFIG) for _ in range(16 // count))
        self.head = nn.Sequential(RMSNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps), nn.Linear(
            CONFIG.hidden_size, CONFIG.vocab_size, bias=False)) if index == count - 1 else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        angles = rotary_angles(x.shape[1], 64, CONFIG.rope_theta, x.device)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return x if self.head is None else self.head(x)


@pytest.mark.parametrize(("name", "rank"), [("Schedule1F1B", 3), ("ScheduleInterleaved1F1B", 0)])
def test_a_pipelined_llama_meets_the_bytes_derived_by_hand(name, rank):
    places = SCHEDULES[name](rank)
    count = RANKS * len(places)
    hidden = torch.empty(1, 512, 2048, device="meta", requires_grad=True)
    first, last = torch.empty(1, 512, dtype=torch.int64, device="meta"), torch.empty(
        1, 512, 128_256, device="meta", requires_grad=True)

    def build():
        stages = [PipelineStage(LlamaStage(i, count).cuda(), i, count, torch.device("cuda"),
                                input_args=first if i == 0 else hidden, output_args=last if i == count - 1 else hidden)
                  for i in places]
        parts = nn.ModuleList([stage.submod for stage in stages])
        parts.schedule = getattr(schedules, name)(
            stages[0] if len(stages) == 1 else stages, 8,
            loss_fn=lambda out, ids: nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()))
        parts.is_first, parts.is_last = 0 in places, count - 1 in places
        return parts

    ids = torch.zeros(8, 512, dtype=torch.int64)
    with world(RANKS, rank):
        p = profile(build, args=(ids, ids), step=step, optimizer="adamw", options=ONE_STEP)
    # A layer has four attention matrices, those of keys and values a quarter as large, three of its MLP and two norms.
    layer = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192 + 2 * 2048
    vocabulary = 128_256 * 2048
    assert p.params == 4 * layer + {0: vocabulary, 3: vocabulary + 2048}.get(rank, 0)
    # A message is a micro-batch's hidden state. Each of 8 crosses every edge of a stage, and its gradient comes back.
    edges = sum((i > 0) + (i < count - 1) for i in places)
    first = [row for row in p.comm if row.bytes != 512 * 2048 * 4]
    # Before torch 2.12 neighbours greet each other first, by a number, which torch 2.9 sends in int64.
    greetings = 2 * edges if torch.__version__ < (2, 12) else 0
    sent = 8 if torch.__version__ < (2, 10) else 4
    assert [row.bytes for row in first] == [sent if row.kind == "send" else 4 for row in first]
    assert len(first) == greetings and list(p.comm[:greetings]) == first
    assert len([row for row in p.comm if row.phase == "forward"]) == 8 * edges + greetings
    assert len([row for row in p.comm if row.phase == "backward"]) == 8 * edges


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
