"""Which layouts there are, and the errors for choices that cannot be."""
from dataclasses import replace

import pytest

from analyzer.errors import InputError
from analyzer.parallel import list_actions
from analyzer.tools.search.compose import divide_blocks, most_in_flight
from analyzer.tools.search.layout import Layout, ModelFacts, Question, Space, list_layouts
from analyzer.tools.search.search import read_cluster

MODEL = ModelFacts(blocks=8, tensor_limit=4)


def layouts(devices: int = 8, batch: int = 16, model: ModelFacts = MODEL, **choices: object) -> list[Layout]:
    return list(list_layouts(Question(devices, 8, batch, 128, Space.of(choices)), model))


def test_each_layout_takes_all_devices_and_samples() -> None:
    found = layouts()
    assert len(found) == len(set(found)) > 100
    assert {(layout.devices, layout.global_batch) for layout in found} == {(8, 16)}
    assert {layout.tensor for layout in found} == {1, 2, 4}  # as far as heads are divided
    assert {layout.pipeline for layout in found} == {1, 2, 4}  # two blocks a stage at least


@pytest.mark.parametrize(("choices", "expected"), [
    # 8 ranks, 16 samples: micro-batches of 1, 2, 4 on 8 ranks of data are 2 and 1 a rank, of 4 none
    ({"tensor": 1, "pipeline": 1, "sharding": "ddp", "checkpointing": "none"}, ["ddp 8, 2 x 1", "ddp 8, 1 x 2"]),
    ({"tensor": 4, "pipeline": 2, "micro_batch": 4, "checkpointing": "blocks", "schedule": "1F1B"},
     ["TP 4, PP 2, 4 x 4, checkpoint blocks"]),
    # a round of an interleaved schedule is as many micro-batches as there are ranks
    ({"pipeline": 4, "tensor": 2, "micro_batch": 4, "checkpointing": "none", "schedule": "Interleaved1F1B"},
     ["TP 2, PP 4 Interleaved1F1B x2, 4 x 4"]),
    ({"shard": 4, "tensor": 1, "pipeline": 1, "micro_batch": 1, "checkpointing": "none", "sharding": "fsdp"},
     ["fsdp 2x4, 2 x 1"])])
def test_choices(choices: dict[str, object], expected: list[str]) -> None:
    assert [str(layout) for layout in layouts(**choices)] == expected


def test_experts_are_divided_as_far_as_ranks_and_experts_go() -> None:
    found = layouts(model=replace(MODEL, tensor_limit=0, experts=6), checkpointing="none", pipeline=1)
    assert {(one.shard, one.expert) for one in found} == {(1, 1), (8, 1), (8, 2)}
    assert "fsdp 8, EP 2, 1 x 1" in map(str, layouts(batch=8, model=replace(MODEL, tensor_limit=0, experts=6)))


def test_optimizer_states_alone_are_divided_among_copies() -> None:
    found = layouts(sharding="zero1", checkpointing=["none", "planned"], micro_batch=2)
    assert [str(one) for one in found] == ["zero1 8, 1 x 2", "zero1 8, 1 x 2, checkpoint planned"]


def test_layouts_with_and_without_an_update_have_an_order() -> None:
    found = sorted(layouts(sharding="fsdp", tensor=1, pipeline=1, micro_batch=2, checkpointing="none", shard=8,
                           optimizer=["adamw_fused", None]))
    assert [str(one) for one in found] == ["fsdp 8, 1 x 2, no update", "fsdp 8, 1 x 2"]


def test_a_model_that_cannot_be_divided() -> None:
    plain = ModelFacts(blocks=8, tensor_limit=0, no_pipeline="its head is its embedding")
    assert {(layout.tensor, layout.pipeline) for layout in layouts(model=plain)} == {(1, 1)}


@pytest.mark.parametrize(("choices", "said"), [
    ({"tenser": 2}, "search(tenser=2): no such choice; there are checkpointing, compile, context, expert"),
    ({"sharding": "zero9"}, "search(sharding='zero9'): must be of ddp, zero1, fsdp, fsdp_kept"),
    ({"tensor": []}, "search(tensor=[]): holds no values"),
    ({"micro_batch": 0}, "search(micro_batch=0): must be a whole number of at least 1")])
def test_choices_that_cannot_be(choices: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        Space.of(choices)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("text", ["h100", "0xh100", "64 h100"])
def test_a_cluster_without_a_number(text: str) -> None:
    with pytest.raises(InputError, match="write how many devices of which kind, as in 64xh100 or 512xdgx_h100"):
        read_cluster(text)


def test_blocks_and_micro_batches_of_stages() -> None:
    assert divide_blocks(10, 4) == [2, 3, 3, 2]  # the ends hold the embedding and the head besides
    assert divide_blocks(11, 4) == [3, 3, 3, 2]
    assert most_in_flight(list_actions("1F1B", 4, 5)) == [4, 3, 2, 1]
    # Megatron-LM: (ranks - rank - 1) * 2 + (chunks - 1) * ranks warm-up passes, and one more
    assert most_in_flight(list_actions("Interleaved1F1B", 2, 4, 2)) == [5, 3]
