"""Blocks that fill a slot of a key-value cache need not run where that is all they do with it and its index."""
import pytest
import torch

from analyzer import profile
from analyzer.replay.cache_slot import Index

from .block_model import list_replayed

transformers = pytest.importorskip("transformers")

IDS = torch.zeros(2, 16, dtype=torch.int64)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64, "bos_token_id": 0,
         "eos_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 10, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}

def count_blocks(found):
    """How many decoder layers were not run."""
    return sum(row.type in ("LlamaDecoderLayer", "GPT2Block", "Gemma2DecoderLayer") for row in list_replayed(found))


def build(model, config):
    with torch.device("meta"):
        return getattr(transformers, model)._from_config(config)


def llama(**settings):
    return build("LlamaForCausalLM",
                 transformers.LlamaConfig(num_hidden_layers=10, num_key_value_heads=2, **SMALL, **settings))


def gemma(window, **settings):
    """Every second layer looks at a window alone; its slot has the window's size as a tensor on the host."""
    return build("Gemma2ForCausalLM", transformers.Gemma2Config(
        num_hidden_layers=18, num_key_value_heads=2, head_dim=8, sliding_window=window, **SMALL, **settings))


def gpt2(**settings):
    return build("GPT2LMHeadModel", transformers.GPT2Config(**GPT2, **settings))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("make", "blocks", "mode"), [
    (llama, 6, "train"), (gpt2, 6, "infer"),
    # nine groups of two layers; more tokens than a window, of which the slot has a part, and fewer
    (lambda: gemma(8), 10, "train"), (lambda: gemma(64), 10, "infer"),
])
def test_defaults_of_the_library_fill_a_cache(make, blocks, mode):
    assert_filled(make(), blocks, mode)


def test_a_cache_is_let_go_where_all_blocks_run():
    """The index scales the attention: what one block does, no other does."""
    assert_filled(gpt2(scale_attn_by_inverse_layer_idx=True), 0, "train")


def assert_filled(model, blocks, mode):
    call = {"kwargs": {"input_ids": IDS, "labels": IDS}, "mode": mode, "optimizer": "sgd" if mode == "train" else None}
    run, found = (profile(model, reuse=reuse, **call) for reuse in (False, True))
    assert found == run
    assert (count_blocks(run), count_blocks(found)) == (0, blocks)


def test_encoders_with_decoders():
    """The first block of each has the relative positions, which it hands on; of the eight others four are not run."""
    model = build("T5ForConditionalGeneration", transformers.T5Config(
        num_layers=9, num_decoder_layers=9, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=64, pad_token_id=0,
        decoder_start_token_id=0))
    run, found = (profile(model, kwargs={"input_ids": IDS, "labels": IDS}, optimizer="sgd", reuse=reuse)
                  for reuse in (False, True))
    assert found == run
    assert [row.path for row in list_replayed(found)] == [
        f"{half}.block.{i}" for half in ("encoder", "decoder") for i in (3, 4, 5, 6)]


class WithCache(torch.nn.Module):
    """Calls a model with a cache of which some slots are filled, and reads what is in it afterwards: all is run."""

    def __init__(self, filled):
        super().__init__()
        self.model, self.filled = llama(), filled

    def forward(self, input_ids):
        cache = transformers.DynamicCache(config=self.model.config)
        for index in self.filled:
            cache.update(torch.zeros(2, 2, 3, 8, device=input_ids.device),
                         torch.zeros(2, 2, 3, 8, device=input_ids.device), index)
        out = self.model(input_ids=input_ids, past_key_values=cache, attention_mask=torch.ones(
            2, 19 if self.filled else 16, device=input_ids.device))
        shapes = [tuple(layer.keys.shape) for layer in cache.layers]
        if shapes != [(2, 2, 19 if i in self.filled else 16, 8) for i in range(10)]:
            raise ValueError(shapes)  # as an assertion, which pytest rewrites, would keep tensors
        return out.logits.sum() + sum(layer.keys.square().sum() + layer.values.exp().sum() for layer in cache.layers)


@pytest.mark.parametrize(("filled", "blocks"), [((), 0), (range(10), 0)])
def test_what_is_in_the_cache_afterwards_and_slots_that_are_taken(filled, blocks):
    model = WithCache(filled)
    run, found = (profile(model, args=(IDS,), reuse=reuse) for reuse in (False, True))
    assert found == run
    assert count_blocks(found) == blocks


@pytest.mark.parametrize("ask",
                         [lambda i: i == 3, lambda i: i + 1, lambda i: [0, 1, 2, 3][i], bool, hash, lambda i: f"{i}",
                          lambda i: {3: 1}.get(i), lambda i: 2 ** i, round, lambda i: range(i)])
def test_an_index_tells_whether_it_was_used(ask):
    index = Index(3)
    assert isinstance(index, int) and index is not None and not index.used
    assert ask(index) == ask(3)
    assert index.used
