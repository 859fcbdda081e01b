"""Published steps of many GPUs, sampled: small stages, as the benchmark predicts all of them."""
import pytest

from benchmarks.accuracy.throughput import TABLE, Run, judge, time_stages
from benchmarks.page import read_block
from benchmarks.truth.table import read_runs, read_truth

RUNS = {run.id: run for run in read_runs(TABLE, Run)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("run_id", [
    "vtrain-single-0818",  # a pipeline of two
    "vtrain-single-0046",  # two tensor-parallel ranks, a pipeline of four
    "vtrain-single-1431",  # eight data-parallel ranks
])
def test_a_published_step_is_met(run_id: str) -> None:
    run = RUNS[run_id]
    assert judge([run], time_stages([run], 1))[0][1].error < 0.25


def test_a_stage_of_several_ranks_holds_its_part_and_its_layers_alone_are_split() -> None:
    """Layer: 12 h^2 + 13 h; weights of products are split, and the biases of query, key, value and of the MLP's first.
    Embedding: 50,257 rows made whole to 128 times the ranks.
    """
    run = Run("", 4, 4, 2, 1024, 16, 4, 1024, 2, 1, 2, 1.0)
    times = [time_stages([run], 1)[shape] for shape in run.stages()]
    h = 1024
    layer = (12 * h * h + 3 * h + 4 * h) // 2 + 6 * h
    words = 50432 // 2 * h
    assert [time.params for time in times] == [2 * layer + words + 1024 * h, 2 * layer + words + 2 * h]


def test_every_row_can_be_divided_as_it_says() -> None:
    assert read_truth(TABLE)["common"]["source"]["licence"] == "MIT"
    for run in RUNS.values():
        assert run.gpus == run.tp * run.dp * run.pp
        assert run.global_batch == run.micro_batches * run.dp * run.micro_batch
        assert run.layers == sum(shape.layers for shape in run.stages())


def test_the_page_has_the_section() -> None:
    assert f"seconds: {len(RUNS)} steps." in read_block("accuracy.md", "accuracy.throughput")
