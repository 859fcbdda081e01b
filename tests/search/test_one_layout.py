"""The step of one layout: Megatron's distributed optimizer, adapters and experts beside divided tensors, refusals."""
import pytest
import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.hardware import find_cluster
from analyzer.recipe import LoraSpec, Recipe
from analyzer.tools.search import Layout, SearchResult, compose_layout
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target

CONFIG = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=False)
BLOCK = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256 + 2 * 128  #: q, k, v and o, the three of the MLP, two norms
ENDS = 2 * 512 * 128 + 128
CLUSTER = find_cluster("dgx_h100")


def _compose(layout: Layout, target: Target | None = None) -> SearchResult:
    inputs = (InputSpec("input_ids", torch.int64, (1, 64)),)
    return compose_layout(target or Target("small", lambda: Llama(CONFIG), inputs), CLUSTER, layout, 64)


def test_ranks_divide_the_states_of_the_distributed_optimizer() -> None:
    """Of each parameter 12 bytes of states: a master weight and two moments in float32; weights of 2 bytes and
    gradients of 4 are whole. Both buffers are filled up to multiples of 128 elements a rank.
    """
    one, four = (_compose(Layout(shard=ranks, sharding="distributed")).best.stages[0] for ranks in (1, 4))
    numel = 4 * BLOCK + ENDS
    assert one.params == four.params == numel
    assert one.update_peak_bytes - four.update_peak_bytes == pytest.approx(12 * numel * 3 / 4, abs=12 * 512 + 2**14)
    copies = _compose(Layout(replicate=4, sharding="distributed")).best.stages[0]
    assert copies.update_peak_bytes == one.update_peak_bytes
    assert one.update_peak_bytes > (2 + 4 + 12) * numel


def test_ranks_divide_tensors_and_stages() -> None:
    step = _compose(Layout(shard=2, tensor=2, pipeline=2, micro_batches=2, sharding="distributed")).best
    assert [stage.params for stage in step.stages] == [
        2 * (BLOCK - 256) // 2 + 2 * 256 + 512 * 128 // 2 + end for end in (0, 128)]


def test_adapters_are_divided_with_their_layers() -> None:
    """Of a layer that is divided by columns the second factor is, of one by rows the first: the others are whole."""
    def build() -> nn.Module:
        return Recipe(lora=LoraSpec(8)).apply(Llama(CONFIG))

    target = Target("adapters", build, (InputSpec("input_ids", torch.int64, (1, 64)),))
    whole = sum(8 * (128 + out) for out in (128, 64, 64, 128, 256, 256)) + 8 * (256 + 128)
    columns, rows = [(128, out) for out in (128, 64, 64, 256, 256)], [(128, 128), (256, 128)]
    half = sum(8 * (into + out // 2) for into, out in columns) + sum(8 * (into // 2 + out) for into, out in rows)
    base = (BLOCK - 256) // 2 + 256
    counts = [_compose(Layout(shard=2, tensor=tensor, sharding="distributed"), target).best.stages[0].params
              for tensor in (1, 2)]
    assert counts == [4 * (BLOCK + whole) + ENDS, 4 * (base + half) + (ENDS - 128) // 2 + 128]


def test_experts_are_whole_where_tensors_are_divided() -> None:
    """Eight experts a block, over the two ranks of a tensor, or these and two that have other sequences."""
    def make() -> nn.Module:
        import transformers

        config = transformers.Qwen3MoeConfig(
            vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]

    found = [_compose(Layout(shard=2, tensor=2, expert=expert, sharding="distributed"), Target("experts", make)).best
             for expert in (1, 2, 4)]
    counts = [step.stages[0].params for step in found]
    experts = 3 * 8 * 3 * 64 * 128  # three blocks, eight experts, three matrices
    assert [counts[0] - count for count in counts[1:]] == [experts // 2, experts * 3 // 4]


@pytest.mark.parametrize(("layout", "problem"), [
    (Layout(tensor=3, sharding="distributed"), "tensor parallelism of 3: what is divided has a common divisor of 64"),
    (Layout(pipeline=8, micro_batches=8), "8 stages: it has 4 blocks"),
    (Layout(context=64), "context parallelism: 64 tokens are no multiple of 128"),
    (Layout(shard=2, expert=2), "0 experts a block are not divided by 2")])
def test_what_a_model_cannot_be_is_told(layout: Layout, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        _compose(layout)


@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_compiled_blocks_are_checkpointed(kind: str) -> None:
    """They keep less than compiled ones that are not, and run more than once what they keep nothing of."""
    plain = _compose(Layout(shard=2, compile=True)).best
    found = _compose(Layout(shard=2, compile=True, checkpointing=kind)).best
    assert found.step_seconds > plain.step_seconds and found.peak_bytes <= plain.peak_bytes
