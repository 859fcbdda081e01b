"""Composed steps are what the direct profile of all ranks of a layout says, and bounds are never above them."""
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import distributed

from analyzer import ProfileOptions
from analyzer.hardware import find_cluster
from analyzer.parallel import RankTable, profile_ranks
from analyzer.parallel.pipeline_schedule import place_stages
from analyzer.tools.search.bound import least_bytes, least_seconds, list_bare
from analyzer.tools.search.compose import ModelSizes, Step, compose, find_actions, list_parts, list_probes
from analyzer.tools.search.layout import Layout
from analyzer.tools.search.probe import Figures, Probe, ProbeJob, Subject, find_template, run_probe
from analyzer.tools.search.rank import RankJob
from analyzer.tools.search.search import model_sizes
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target

CONFIG = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=5, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=False)
SUBJECT = Subject(Target("small", lambda: Llama(CONFIG), (InputSpec("input_ids", torch.int64, (1, 64)), )),
                  find_cluster("dgx_h100"), 64)
PIPELINE = Layout(shard=2, pipeline=2, micro_batches=3, sharding="fsdp_kept")


@cache
def figures(probe: Probe) -> Figures:
    found = run_probe(ProbeJob(SUBJECT, probe))
    assert "error" not in found, found
    return found


@cache
def sizes() -> ModelSizes:
    return model_sizes(find_template(SUBJECT), 64)


def step_of(layout: Layout) -> Step:
    return compose(layout, sizes(), {key: figures(probe) for key, probe in list_probes(layout, sizes()).items()})


def profile_directly(layout: Layout) -> RankTable:
    """Every kind of rank of a layout as torch's own wrappers and schedules run it, all blocks and micro-batches."""
    parts = list_parts(layout, CONFIG.num_hidden_layers)
    placed = {0: 0}
    if layout.pipeline > 1:
        placed = place_stages(find_actions(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual))
    jobs: list[RankJob] = []

    def build() -> torch.nn.Module:
        rank = distributed.get_rank()
        own = [stage for stage in sorted(placed) if placed[stage] == rank // (layout.devices // layout.pipeline)]
        jobs.append(RankJob(find_template(SUBJECT), layout, [parts[stage] for stage in own], own, 64))
        return jobs[-1].build()

    def inputs() -> tuple[torch.Tensor]:
        return (torch.zeros(layout.micro_batches * layout.micro_batch, 64 // layout.context, dtype=torch.int64), )

    return profile_ranks(build, inputs, size=layout.devices, cluster=SUBJECT.cluster, device=SUBJECT.device,
                         step=lambda *given: jobs[-1].step(*given), optimizer=layout.optimizer,
                         options=ProfileOptions(keep_events=False))


@pytest.mark.parametrize("layout", [
    PIPELINE,
    replace(PIPELINE, tensor=2, micro_batches=4),
    Layout(shard=4, micro_batches=3)], ids=str)
def test_a_composed_step_is_the_direct_one(layout: Layout) -> None:
    step, table = step_of(layout), profile_directly(layout)
    # one block of a divided stage is 23,040 bytes off
    assert [stage.needed_bytes for stage in step.stages] == pytest.approx(
        [row.peak_allocated_bytes for row in table.rows], rel=0 if layout.tensor == 1 else 5e-4)
    assert step.step_seconds == pytest.approx(table.step_seconds, rel=1e-4)


@pytest.mark.parametrize("layout", [
    PIPELINE, Layout(shard=4, micro_batches=3), replace(PIPELINE, tensor=2, micro_batches=4),
    replace(PIPELINE, micro_batches=2, virtual=2, schedule="Interleaved1F1B")], ids=str)
def test_bounds_are_not_above_the_step(layout: Layout) -> None:
    step = step_of(layout)
    bare = {name: figures(probe) for name, probe in list_bare(layout, sizes()).items()}
    assert 0 < least_bytes(layout, sizes(), None) <= least_bytes(layout, sizes(), bare) <= step.peak_bytes
    assert 0.5 * step.step_seconds < least_seconds(layout, sizes(), bare, SUBJECT.cluster) <= step.step_seconds
