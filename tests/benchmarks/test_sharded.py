"""Published steps of sharded models: that every row can be run as it says, and a small one is met."""
import pytest

from benchmarks.accuracy import sharded as accuracy_sharded
from benchmarks.accuracy.latency import Judged
from benchmarks.accuracy.sharded import TABLE, Run, cluster_of_run, judge
from benchmarks.page import read_block
from benchmarks.truth.table import read_runs, read_truth

RUNS = {run.id: run for run in read_runs(TABLE, Run)}


def test_a_published_step_is_met() -> None:
    """MPT of 125 million parameters on 8 A100."""
    assert judge(RUNS["mpt-125m-seq4096-8xa100_80gb-mb16-ga2-full_shard-acf-amp_bf16"]).error < 0.25


def test_one_row_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "mpt-125m-seq4096-8xa100_80gb-mb16-ga2-full_shard-acf-amp_bf16"
    monkeypatch.setattr("sys.argv", ["accuracy_sharded", name, "--processes", "1"])
    monkeypatch.setattr(accuracy_sharded, "judge", lambda run: Judged("mpt", "a100", "bf16", 2.0, 2.1, 1.9, 2.3, None))
    assert accuracy_sharded.main() == 0
    assert name in capsys.readouterr().out


def test_every_row_is_of_the_model_that_is_rebuilt() -> None:
    """12 h^2 + 13 h a layer, its norms included; embedding, positions and the last norm."""
    for run in RUNS.values():
        layer = 12 * run.hidden**2 + 13 * run.hidden
        whole = run.layers * layer + (run.vocab + run.seq_len) * run.hidden + 2 * run.hidden
        assert abs(whole / run.params - 1) < 2e-3, run.id


def test_sources_and_networks_are_told() -> None:
    assert read_truth(TABLE)["common"]["source"]["licence"] == "Apache-2.0"
    told = cluster_of_run(RUNS["mpt-7b-seq2048-64xa100_40gb-mb18-ga1-full_shard-act-bf16"])
    assert told.fabric is not None and told.fabric.bandwidth == 25e9


def test_the_page_has_the_section() -> None:
    assert f"seconds: {len(RUNS)} steps." in read_block("accuracy.md", "accuracy.sharded")
