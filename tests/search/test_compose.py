"""Composed steps are what the direct profile of all ranks of a layout says, and bounds are never above them."""
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, distributed, nn

from analyzer import ProfileOptions, profile
from analyzer.distributed.world import world
from analyzer.hardware import find_cluster
from analyzer.parallel import RankTable, profile_ranks
from analyzer.parallel.pipeline_schedule import place_stages
from analyzer.parallel.profile_ranks import find_exchange, find_spread
from analyzer.parallel.rank_row import find_compute_spreads
from analyzer.profilers.collective import POINT_TO_POINT
from analyzer.tools.search.bound import (
    DOES_MORE,
    close_seconds,
    does_more,
    least_bytes,
    least_seconds,
    list_bare,
    list_close,
)
from analyzer.tools.search.compose import JobStep, ModelSizes, compose, find_actions, list_parts, list_probes
from analyzer.tools.search.figures import Figures
from analyzer.tools.search.layout import Layout
from analyzer.tools.search.probe import PROBE_OPTIONS, Probe, ProbeJob, Subject, find_template, run_probe
from analyzer.tools.search.rank import RankJob
from analyzer.tools.search.search import model_sizes
from analyzer.tools.search.stage import Piece
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target

CONFIG = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=5, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=False)
SUBJECT = Subject(Target("small", lambda: Llama(CONFIG), (InputSpec("input_ids", torch.int64, (1, 64)), )),
                  find_cluster("dgx_h100"), 64)
PIPELINE = Layout(shard=2, pipeline=2, micro_batches=3, sharding="fsdp_kept")


class Experts(nn.Module):
    """As those of transformers: eight, of which each token goes to two."""

    def __init__(self, width: int, num_experts: int = 8) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, width, width))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        places = chosen.reshape(-1)
        order = torch.argsort(places, stable=True)
        counts = torch.histc(places, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        out = torch._grouped_mm(tokens[order // chosen.shape[-1]], self.up.transpose(1, 2), offs=ends)
        return torch.zeros_like(tokens).index_add(0, order // chosen.shape[-1], out * weights.reshape(-1)[order, None])


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(width), nn.Linear(width, 8), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        return x + self.experts(rows, chosen, weights).view_as(x)


def build_mixtures() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 128), nn.Sequential(*(Mixture(128) for _ in range(3))),
                         nn.Linear(128, 512, bias=False))


MIXTURES = replace(SUBJECT, target=Target("mixtures", build_mixtures, SUBJECT.target.inputs))


@cache
def figures(probe: Probe, subject: Subject = SUBJECT) -> Figures:
    found = run_probe(ProbeJob(subject, probe))
    assert "error" not in found, found
    return found


@cache
def sizes(subject: Subject = SUBJECT) -> ModelSizes:
    return model_sizes(find_template(subject), 64)


def step_of(layout: Layout, subject: Subject = SUBJECT) -> JobStep:
    return compose(layout, sizes(subject), {key: figures(probe, subject)
                                            for key, probe in list_probes(layout, sizes(subject)).items()})


def profile_directly(layout: Layout, subject: Subject = SUBJECT) -> RankTable:
    """Every kind of rank of a layout as torch's own wrappers and schedules run it, all blocks and micro-batches."""
    parts = list_parts(layout, sizes(subject).blocks)
    placed = {0: 0}
    if layout.pipeline > 1:
        placed = place_stages(find_actions(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual))
    jobs: list[RankJob] = []

    def build() -> torch.nn.Module:
        rank = distributed.get_rank()
        own = [stage for stage in sorted(placed) if placed[stage] == rank // (layout.devices // layout.pipeline)]
        jobs.append(RankJob(find_template(subject), layout, [parts[stage] for stage in own], own, 64))
        return jobs[-1].build()

    def inputs() -> tuple[torch.Tensor]:
        return (torch.zeros(layout.micro_batches * layout.micro_batch, 64 // layout.context, dtype=torch.int64), )

    return profile_ranks(build, inputs, size=layout.devices, cluster=SUBJECT.cluster, device=SUBJECT.device,
                         step=lambda *given: jobs[-1].step(*given),
                         optimizer=(lambda parameters: jobs[-1].make_optimizer()(parameters)) if layout.is_distributed
                         else RankJob(find_template(subject), layout, [], [], 64).make_optimizer(),
                         options=ProfileOptions(keep_events=False))


def name_case(value: Layout | Subject) -> str:
    return str(value) if isinstance(value, Layout) else str(value.target.name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("layout", "subject"), [
    (PIPELINE, SUBJECT),
    (replace(PIPELINE, tensor=2, micro_batches=4), SUBJECT),
    (Layout(shard=4, micro_batches=3), SUBJECT),
    (Layout(replicate=2, micro_batches=3, sharding="zero1"), SUBJECT),
    (replace(PIPELINE, expert=2), MIXTURES),
    (Layout(shard=2, micro_batches=3, sharding="distributed"), SUBJECT),
    (replace(PIPELINE, tensor=2, micro_batches=4, sharding="distributed"), SUBJECT),
    (replace(PIPELINE, expert=2, sharding="distributed"), MIXTURES)], ids=name_case)
def test_a_composed_step_is_the_direct_one(layout: Layout, subject: Subject) -> None:
    step, table = step_of(layout, subject), profile_directly(layout, subject)
    # one block of a divided stage is 23,040 bytes off
    assert [stage.needed_bytes for stage in step.stages] == pytest.approx(
        [row.peak_allocated_bytes for row in table.rows], rel=0 if layout.tensor == 1 else 5e-4)
    assert step.step_seconds == pytest.approx(table.step_seconds, rel=1e-4)


def test_figures_are_what_rows_of_a_profile_add_up_to() -> None:
    layout = replace(PIPELINE, checkpointing="blocks")
    probes = list_probes(layout, sizes())
    middle = replace(probes["middle", 1, 3], with_spreads=True)
    with world(middle.layout.devices, 2, cluster=SUBJECT.cluster):
        job = RankJob(find_template(SUBJECT), middle.layout, [middle.part], [1], 64)
        plain = profile(job.build, job.inputs(), device=SUBJECT.device, step=job.step, options=PROBE_OPTIONS,
                        optimizer=job.make_optimizer())
    found, rows = figures(middle), [row for row in plain.comm or () if row.kind in POINT_TO_POINT]
    backward = plain.phases["backward"]
    waited = sum(row.exposed_seconds or 0 for row in rows if row.phase == "backward")
    exchange = sum(row.exposed_seconds or 0 for row in find_exchange(plain.comm or ()))
    assert waited and found["exchange_seconds"] == exchange
    assert found["backward_seconds"] == pytest.approx((backward.seconds or 0) - waited - exchange, rel=1e-12)
    assert found["transfer_spread"] == pytest.approx(find_spread(plain, rows), rel=1e-12)
    assert (found["above"], found["below"]) == find_compute_spreads(plain)
    # of one probe for each kind of rank the range is read
    assert sum("above" in figures(probe) for probe in probes.values()) == 3


@pytest.mark.sweep(1)
@pytest.mark.parametrize("layout", [
    Layout(shard=4, micro_batches=3), Layout(shard=2, tensor=2, micro_batches=2, sharding="fsdp_kept"),
    Layout(shard=2, micro_batches=2, checkpointing="blocks"), Layout(replicate=2, sharding="ddp")], ids=str)
def test_a_model_of_many_blocks_is_composed_of_few(layout: Layout) -> None:
    many = Subject(Target("many", lambda: Llama(replace(CONFIG, num_hidden_layers=8)), SUBJECT.target.inputs),
                   SUBJECT.cluster, 64)
    probes = list_probes(layout, sizes(many))
    step, table = step_of(layout, many), profile_directly(layout, many)
    assert {probe.part.blocks for probe in probes.values()} == {3, 5}
    known = {name: figures(probe, many) for name, probe in list_close(layout, sizes(many)).items()}
    bare = {name: figures(probe, many) for name, probe in list_bare(layout, sizes(many)).items()}
    assert {blocks for _, blocks, _ in known} == {3}
    assert 0 < close_seconds(layout, sizes(many), bare, known) <= step.step_seconds
    # blocks of the allocator keep what is left of them, up to 1 MiB each, which goes by what was freed before
    assert step.peak_bytes == pytest.approx(table.rows[0].peak_allocated_bytes, rel=5e-4, abs=2**19)
    assert step.step_seconds == pytest.approx(table.step_seconds, rel=5e-3)
    assert step.step_seconds_range == pytest.approx(table.profiles[0].step_seconds_range, rel=2e-2)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("layout", "subject"), [
    (PIPELINE, SUBJECT), (Layout(shard=4, micro_batches=3), SUBJECT),
    (replace(PIPELINE, tensor=2, micro_batches=4), SUBJECT),
    (replace(PIPELINE, micro_batches=2, virtual=2, schedule="Interleaved1F1B"), SUBJECT),
    (Layout(replicate=2, micro_batches=3, sharding="zero1"), SUBJECT),
    (Layout(shard=4, micro_batches=2, checkpointing="planned"), SUBJECT),
    (replace(PIPELINE, expert=2), MIXTURES), (Layout(shard=4, expert=4), MIXTURES)], ids=name_case)
def test_bounds_are_not_above_the_step(layout: Layout, subject: Subject) -> None:
    check_bounds(layout, subject)


def check_bounds(layout: Layout, subject: Subject) -> None:
    step = step_of(layout, subject)
    bare = {name: figures(probe, subject) for name, probe in list_bare(layout, sizes(subject)).items()}
    assert 0 < least_bytes(layout, sizes(subject), None) <= least_bytes(layout, sizes(subject), bare) <= step.peak_bytes
    assert 0.5 * step.step_seconds < least_seconds(layout, sizes(subject), bare, subject.cluster) <= step.step_seconds
    known = {name: figures(probe, subject) for name, probe in list_close(layout, sizes(subject)).items()}
    if known:
        assert close_seconds(layout, sizes(subject), bare, known) <= step.step_seconds


def test_a_layout_that_does_more_takes_longer() -> None:
    less = replace(PIPELINE, pipeline=1)
    more = [replace(less, sharding="fsdp"), replace(less, checkpointing="selective"),
            replace(less, sharding="fsdp", checkpointing="blocks")]
    for layout in more:
        assert does_more(layout, less) and not does_more(less, layout)
        assert DOES_MORE * step_of(less).step_seconds <= step_of(layout).step_seconds
    assert not does_more(replace(more[0], micro_batch=2), less) and not does_more(replace(more[0], compile=True), less)
    assert not does_more(replace(less, checkpointing="planned"), less)


@pytest.mark.parametrize(("schedule", "micro_batches", "expected"), [
    # the device has 4 blocks of 3 s, an end of 1 s at each side; rank 1 waits for the 2 blocks and the end before it
    ("1F1B", 10, 10 * (2 * 3 + 1) + (2 * 3 + 1)),
    ("ZBVZeroBubble", 10, 10 * (2 * 3 + 2) + 0),  # rank 0 has both ends, and no rank before it
])
def test_a_host_and_its_device_work_at_once(schedule: str, micro_batches: int, expected: float) -> None:
    def bare_figures(blocks: int, ends: int, launch: float) -> Figures:  # of a block, ``launch`` is waiting
        busy = 3.0 * blocks + ends
        return {"step_seconds": busy + launch * blocks, "bound_launch": launch * blocks,
                "forward_seconds": busy / 3 + launch * blocks / 3, "forward_launch_seconds": launch * blocks / 3}

    virtual = 1 if schedule == "1F1B" else 2
    layout = Layout(pipeline=2, micro_batches=micro_batches, virtual=virtual, schedule=schedule)
    model = ModelSizes(4, 0, 0, 0, (0, 0, 0), 8, True, 8)

    def least(launch: float) -> float:
        kinds = {"one": (1, 0), "two": (2, 0), "plain": (1, 0), "first": (1, 1), "last": (1, 1)}
        bare = {name: bare_figures(*kind, launch) for name, kind in kinds.items()}
        return least_seconds(layout, model, bare, SUBJECT.cluster)

    assert least(0.0) == least(2.0) == pytest.approx(expected)  # the host takes less than the device
    assert least(9.0) == pytest.approx(micro_batches * 2 * 9)  # and more: two blocks a rank


def test_bounds_of_float8_are_of_its_products() -> None:
    pytest.importorskip("torchao")
    check_bounds(Layout(shard=4, micro_batches=2, precision="float8"), SUBJECT)


def test_experts_are_on_several_ranks() -> None:
    whole, divided = (step_of(Layout(shard=4, expert=expert), MIXTURES) for expert in (1, 4))
    assert whole.stages[0].params == divided.stages[0].params  # a quarter of all, either way
    # a block's experts are gathered whole in bfloat16, or not at all: three quarters of 8 x 128 x 128
    assert whole.peak_bytes > divided.peak_bytes


def test_states_of_zero1_are_divided() -> None:
    copies, divided = (step_of(Layout(replicate=2, sharding=sharding)) for sharding in ("ddp", "zero1"))
    # the largest matrices of the rank come first: 8 bytes for each element that the other rank has
    assert 0 < copies.peak_bytes - divided.peak_bytes <= 8 * sizes().held(Piece(5), 1)
