"""Probes: what is left out of their first step, and what neighbors share, changes no figure."""
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from analyzer.distributed.world import world
from analyzer.hardware import find_cluster
from analyzer.tools.search import probe as module
from analyzer.tools.search.layout import Layout
from analyzer.tools.search.peaks import extend
from analyzer.tools.search.probe import Probe, ProbeJob, Subject, run_probe, run_probes
from analyzer.tools.search.rank import RankJob
from analyzer.tools.search.stage import Piece
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target

CONFIG = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=False)
SUBJECT = Subject(Target("small", lambda: Llama(CONFIG), (InputSpec("input_ids", torch.int64, (1, 64)), )),
                  find_cluster("dgx_h100"), 64)


@pytest.mark.parametrize("layout", [
    Layout(shard=4, micro_batches=2, checkpointing="blocks"), Layout(replicate=4, micro_batches=2, sharding="zero1"),
    Layout(shard=4, micro_batches=2, sharding="distributed")], ids=str)
def test_a_first_step_of_one_micro_batch_changes_no_figure(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_probe(ProbeJob(SUBJECT, Probe(layout, Piece(3), with_spreads=True)))
    build = RankJob.build

    def with_whole_steps(job: RankJob) -> nn.Module:
        made = build(job)
        job._steps = 1
        return made

    monkeypatch.setattr(RankJob, "build", with_whole_steps)
    whole = run_probe(ProbeJob(SUBJECT, Probe(layout, Piece(3), with_spreads=True)))
    assert "error" not in found and whole.keys() != found.keys()
    # peaks of the first step, of which the last one's are the highest
    assert {name: whole[name] for name in found if not name.startswith("pass 0 ")} == {
        name: value for name, value in found.items() if not name.startswith("pass 0 ")}
    assert max(value for name, value in whole.items() if name.startswith("pass 0 ")) <= whole["pass_peak_bytes"]


def test_neighbors_of_one_place_share_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = Layout(shard=2, tensor=2, sharding="fsdp_kept", micro_batches=2)
    middle, few = Piece(1, False, False), Piece(2, False, False)
    probes = [Probe(divided, middle, 0, True), Probe(Layout(shard=2, micro_batches=2), middle),
              Probe(divided, few, 0, True), Probe(divided, Piece(2)), Probe(divided, middle, 0, True)]
    jobs = [ProbeJob(SUBJECT, probe) for probe in probes]
    alone = [run_probe(job) for job in jobs]
    entered: list[int] = []
    measure = module.measure

    def enter(size: int, *args: Any, **options: Any) -> Any:
        entered.append(size)
        return world(size, *args, **options)

    monkeypatch.setattr(module, "world", enter)
    assert list(run_probes(jobs)) == list(zip(jobs, alone)) and not any("error" in found for found in alone)
    assert entered == [4, 2, 4]

    def fail(subject: Subject, probe: Probe, *args: Any) -> Any:
        if probe.part.first:
            raise RuntimeError("no such rank\nat all")
        return measure(subject, probe, *args)

    # behind one that fails in it, others have a world of their own
    monkeypatch.setattr(module, "measure", fail)
    found: Iterator[Any] = (figures for _, figures in run_probes(jobs[2:]))
    assert [*found] == [alone[2], {"error": "RuntimeError: no such rank"}, alone[4]]
    assert entered[3:] == [4, 4]


def test_memory_that_would_run_out_changes_no_figure() -> None:
    """A layout is left out by its composed bytes; figures are of what is allocated, and reserved bytes change none."""
    def of(memory_bytes: int | None) -> Subject:
        return replace(SUBJECT, cluster=replace(SUBJECT.cluster, device=replace(
            SUBJECT.cluster.device, memory_bytes=memory_bytes)))

    probe = Probe(Layout(shard=4, micro_batches=2), Piece(3), with_spreads=True)
    free = run_probe(ProbeJob(of(None), probe))
    assert "last_pass_seconds" in free
    needed = int(max(free["pass_peak_bytes"], free["update_peak_bytes"]) + free["unseen_bytes"])
    # where the step allocates 68.5 MiB and reserves 72 MiB: of a device between, and of one that lacks a tenth
    for capacity in (needed, needed + 2**20, needed * 9 // 10):
        assert run_probe(ProbeJob(of(capacity), probe)) == free


def test_a_defect_of_this_package_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda *_: extend(9, {1: {}, 2: {}}))  # which lacks what it is asked for
    error = run_probe(ProbeJob(SUBJECT, Probe(Layout(), Piece(1))))["error"]
    assert error.startswith("a defect of analyzer, please report it: KeyError: 3, at ") and "peaks.py:" in error
