"""What models keep of a token, and of a sequence, for each layout of a cache: by hand, from their configs."""
import copy
from types import SimpleNamespace

import pytest
import torch

from analyzer.errors import InputError
from analyzer.tools.generation import profile_eager_passes
from analyzer.tools.generation.stored_cache import CacheForm, StoredLayer, make_stored_cache
from analyzer.tools.serving import Batch, Chunk, Layout, PassTimer, make_deployment, profile_served, read_served_model
from analyzer.zoo.published_shape import find_shape
from analyzer.zoo.target import load_target
from analyzer.zoo.torchvision_ops import define_torchvision_ops

HALF = 2     # bytes of a channel
INDEX = 128 + 4  # of a token in an indexer's cache: 128 channels in 8 bits, and a float


def build(name, model, **fields):
    """A model of transformers with these fields, those of a published shape before them."""
    define_torchvision_ops()
    import transformers

    shape, chosen = find_shape(name), getattr(transformers, f"{model}ForCausalLM")
    known = {} if shape is None else {key: value for key, value in copy.deepcopy(shape.config).items()
                                      if key not in ("torch_dtype", "architectures", "model_type")}
    found = chosen.config_class.from_dict({**known, **fields, "dtype": torch.bfloat16})
    return lambda: chosen._from_config(found)


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16}
KEYS = 2 * 2 * 16 * HALF  # of one layer of these: keys and values of 2 heads
LATENT = {**SMALL, "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32,
          "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
#: name, published shape, class, fields; bytes of a token in all layers that keep every token, tokens of windows by
#: layers, bytes of states of a sequence.
LAYOUTS = [
    # keys of fewer heads, and windows in all layers but each second one
    ("llama", "", "Llama", SMALL, 4 * KEYS, {}, 0),
    ("gemma 2", "", "Gemma2", {**SMALL, "sliding_window": 32}, 2 * KEYS, {32: 2}, 0),
    ("mistral", "", "Mistral", {**SMALL, "sliding_window": 32}, 0, {32: 4}, 0),
    # chunked attention in all layers but each fourth one
    ("llama 4", "", "Llama4", {**SMALL, "attention_chunk_size": 32, "intermediate_size_mlp": 128,
                                "num_local_experts": 2, "pad_token_id": None}, 1 * KEYS, {32: 3}, 0),
    # of 4 layers the last 2 read what the last ones before them of their kind have kept
    ("gemma 3n", "", "Gemma3n", {**SMALL, "intermediate_size": [128] * 4, "num_kv_shared_layers": 2,
                                 "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
                                 "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": 128,
                                 "hidden_size_per_layer_input": 8, "laurel_rank": 4}, 1 * KEYS, {32: 1}, 0),
    # latents, one for all heads: the rank and the rotated channels
    ("deepseek v3", "", "DeepseekV3", LATENT, 4 * (64 + 8) * HALF, {}, 0),
    # with an indexer, whose keys lie beside them
    ("deepseek v3.2", "", "DeepseekV32", {**LATENT, "index_topk": 32, "index_n_heads": 4, "index_head_dim": 128},
     4 * ((64 + 8) * HALF + INDEX), {}, 0),
    ("glm 5", "zai-org/GLM-5", "GlmMoeDsa", {"num_hidden_layers": 2}, 2 * ((512 + 64) * HALF + INDEX), {}, 0),
    # states beside attention in each layer: 2 groups of 8 states, 4 heads of 16 channels; convolutions of 4 taps
    ("falcon h1", "", "FalconH1", {**SMALL, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
                                   "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 1},
     4 * KEYS, {}, 4 * (4 * 16 * 8 * 4 + (64 + 2 * 2 * 8) * 4 * HALF)),
    # attention that is the model's own code: its first product adds the positions
    ("bloom", "", "Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}, 2 * 2 * 64 * HALF, {}, 0)]


def read(name, published, model, fields):
    return read_served_model(build(published, model, **fields), name)


@pytest.mark.parametrize(("name", "published", "model", "fields", "token", "windows", "states"), LAYOUTS,
                         ids=[row[0] for row in LAYOUTS])
def test_what_is_kept(name, published, model, fields, token, windows, states):
    found = read(name, published, model, fields)
    deployment = make_deployment(found)
    assert deployment.cache_token_bytes() == token
    kept = {window: sum(count for kernel, count in found.attentions if kernel.window == window
                        and not kernel.is_shared) for window in {kernel.window for kernel, _ in found.attentions} - {0}}
    assert kept == windows
    assert found.state_bytes == states
    # 1,024 tokens are whole pages; of a window the pages that it lies in, and one more
    assert deployment.cache_bytes(1024) == 1024 * token + states + sum(
        count * KEYS * (window + 16) for window, count in windows.items())
    assert not found.notes


def test_an_indexer_chooses_what_attention_reads():
    model = read(*LAYOUTS[7][:4])
    chosen, index = sorted((kernel for kernel, _ in model.attentions), key=lambda kernel: kernel.is_index)
    assert (chosen.selected, chosen.head_dim, chosen.value_dim) == (2048, 576, 512)
    assert (index.heads, index.head_dim) == (32, 128)
    # every rank makes all scores, so its product of queries is whole; 8 bits of latents have scales of their own
    deployment = make_deployment(model, layout=Layout(tp=4), cache="fp8", device="b200")
    assert [deployment.local_product(product).parts for product, _ in model.products
            if 32 * 128 in product.parts] == [(64 * 256 // 4, 32 * 128)]
    assert deployment.cache_token_bytes() == 2 * (512 + 16 + 64 * HALF + INDEX)
    timer = PassTimer(deployment)
    short, long = (timer.time(Batch(8, tokens)).parts for tokens in (4096, 65_536))
    assert long["attention"] == short["attention"]  # 2,048 tokens of either
    assert long["scores of the indexer"][1] > short["scores of the indexer"][1]
    first, last = (timer.time(Batch(0, 1, (Chunk(4096, tokens),))).parts for tokens in (8192, 65_536))
    assert first["attention"] == last["attention"]
    assert "an indexer chooses 2,048 tokens" in profile_served(deployment, 128, 8).summary().replace("\n  ", " ")


def test_keys_that_a_token_sees():
    for tokens, context, most in ((4, 10, 0), (4, 10, 8), (4, 10, 2), (10, 10, 3), (5, 5, 100)):
        seen = [min(place, most or place) for place in range(context - tokens + 1, context + 1)]
        assert Chunk(tokens, context).count_seen(most) == sum(seen) / tokens


def test_passes_over_latents_that_an_indexer_chooses_of():
    """A pass reads 32 latents of 72 channels, and scores of 4 heads of 128 channels with each token before."""
    model = build("", "DeepseekV32", **LAYOUTS[6][3])
    short, long = (profile_eager_passes(model, 2, tokens) for tokens in (64, 128))
    assert short.used_cache_bytes == 2 * 64 * 4 * ((64 + 8) * HALF + INDEX)
    # products with keys, and of scores with the weights of heads; beside them what is done to each score
    products = 2 * 64 * 4 * 2 * (4 * 128 + 4)
    assert products < long.decode.flops - short.decode.flops < 1.02 * products


def test_states_begin_anew_beside_keys_that_stay():
    fields = LAYOUTS[8][3]
    one, three = (profile_eager_passes(build("", "FalconH1", **fields), n, 64) for n in (1, 3))
    assert three.cache_bytes == 3 * one.cache_bytes == 3 * (64 * 4 * KEYS + LAYOUTS[8][6])
    assert (three.prefill.sequences, three.prefill.tokens, three.decode.context_tokens) == (1, 63, 64)


def test_transformers_5_0_has_no_caches_of_states_and_indexers(monkeypatch):
    import transformers
    from transformers import cache_utils

    config = transformers.LlamaConfig(**SMALL)
    monkeypatch.setattr(transformers, "cache_utils", SimpleNamespace(**{
        name: value for name, value in vars(cache_utils).items() if "LinearAttention" not in name
        and "Indexed" not in name}))
    assert [type(layer) for layer in make_stored_cache(config, CacheForm("paged"), 8).layers] == 4 * [StoredLayer]


def test_latents_that_transformers_hands_on_expanded_are_refused(monkeypatch):
    """Before 5.15 the cache of DeepSeek-V3 was given keys and values: 16 times the bytes of a server's."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    model = build("", "DeepseekV3", **LATENT)
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(InputError, match="DeepseekV3Attention of transformers .* where a server keeps latents; .*5.15"):
        read_served_model(model, "deepseek v3")


def test_a_cache_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="layer 2 keeps a DeepseekV4CSACache, which is not known here"):
        read_served_model(load_target("hf:deepseek-v4-flash").build)


def test_layers_that_read_images_are_left_out_without_any():
    """40 layers, 8 of which read images alone; 8 heads of 128 channels."""
    model = read_served_model(load_target("hf:llama-3.2-11b-vision").build)
    assert make_deployment(model).cache_token_bytes() == 32 * 2 * 8 * 128 * HALF


def test_a_cache_that_grows_by_more_is_told():
    from analyzer.tools.serving.read_model import _compare_kept

    model = read(*LAYOUTS[9][:4])
    assert _compare_kept(model, [256, 512], "Own") == (0, "")      # 2 layers of keys and values of 64 channels
    assert _compare_kept(model, [300, 556], "Own") == (2 * 44, "")  # and a state
    states, said = _compare_kept(model, [512, 1024], "Own")
    assert "grows by 1,024 bytes a token in 16 bits, and keys and values that were found take 512" in said
