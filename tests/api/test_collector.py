"""Programs that profile in a loop: what they drop is gone at once, and Python's collector works as it did."""
import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.fx.surroundings import Surroundings
from analyzer.meta.address_space import spaces
from analyzer.on_use import rare_collections
from analyzer.record.log import Log
from analyzer.zoo import MODELS

ROWS = ("nodes", "modules", "timeline", "memory_events", "operators")


def gpt2():
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=128)).train(), torch.zeros(
            1, 16, dtype=torch.long, device="meta")


def resnet():
    return MODELS["resnet18"].factory(), torch.empty(2, 3, 64, 64, device="meta")


RUNS = {
    "played blocks and optimizer": lambda: profile(*gpt2(), optimizer="adamw"),
    "run whole": lambda: profile(*gpt2(), reuse=False)}


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_logs() -> int:
    return sum(type(thing) is Log for thing in gc.get_objects())


@pytest.mark.parametrize("reads", [(), ROWS], ids=["unread", "read"])
@pytest.mark.parametrize("run", RUNS)
def test_a_profile_that_is_dropped_is_gone(run, reads, no_collections):
    before, collections = count_logs(), gc.get_stats()[-1]["collections"]
    found = RUNS[run]()
    for name in reads:
        getattr(found, name)
    assert found.fwd_flops
    assert count_logs() > before or reads  # the rows that are not read yet come from it
    del found
    assert count_logs() == before
    assert gc.get_stats()[-1]["collections"] == collections  # a profile collects what it left in a cycle


def test_a_graph_that_was_profiled_leads_to_no_more_than_before(no_collections):
    x, names = torch.empty(4, 16), ("mappings", "sequences", "objects", "classes", "rows", "places")
    graph = symbolic_trace(torch.nn.Linear(16, 16), meta_args={"input": x})

    def count_reached() -> list[int]:
        found = Surroundings([graph], (), ())
        return [len(getattr(found, name)) for name in names]

    before = len(spaces)
    symbolic_profile(graph, x)
    reached = count_reached()
    assert symbolic_profile(graph, x).meta["profile"].fwd_flops and count_reached() == reached
    del graph.meta["profile"]
    assert count_reached() == reached  # what was found of the last run is none of the model's state
    assert len(spaces) == before  # and nothing of the runs is in a cycle


def test_the_collector_counts_on(no_collections):
    for _ in range(3):
        gc.collect(0)
    before = gc.get_count()[1:]
    profile(*resnet())
    # else old objects of a program that profiles in a loop would never be collected
    assert gc.get_count()[1:] == before != (0, 0)


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10), (2**31 - 1, 5, 5)])
def test_thresholds_are_as_they_were(thresholds):
    before = gc.get_threshold()
    try:
        gc.set_threshold(*thresholds)
        profile(*resnet(), mode="infer")
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


def test_runs_that_overlap_leave_the_threshold_as_it_was():
    before = gc.get_threshold()
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    during = gc.get_threshold()
    second.__enter__()
    assert gc.get_threshold() == during == (100 * before[0], *before[1:])
    first.__exit__(None, None, None)  # not the last that was opened: threads end in any order
    assert gc.get_threshold() == during
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
