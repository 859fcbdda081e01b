"""Inference as it is served: caches to the byte for grouped heads, windows and latents, the kernel that reads them, the
largest number of sequences, batches beside each other.
"""
from itertools import pairwise

import pytest
import torch

from analyzer import ProfileOptions
from analyzer.api.argument import build_model
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.tools.generation import (
    GenerationProfile,
    max_sequences,
    profile_eager_passes,
    profile_generate,
    sweep_sequences,
)
from analyzer.tools.generation.serving import serving_table
from analyzer.tools.generation.stored_cache import CacheForm, cached_attention
from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.target import load_target

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def llama_8b():
    return build_model(load_target("hf:llama-3.1-8b").build)


def small(name="Llama", **options):
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config)


# ---------------------------------------------------------------- bytes of caches, by hand


def test_a_cache_of_grouped_heads(llama_8b):
    per_token = 2 * 32 * 8 * 128  # keys and values, layers, key heads, channels
    assert per_token * 2 == 131_072  # 128 KiB a token in bfloat16
    plain = profile_generate(llama_8b, 1000, 9, batch_size=4, samples=1)
    assert plain.cache_bytes == 4 * 1008 * per_token * 2
    fp8 = profile_generate(llama_8b, 1000, 11, batch_size=4, samples=1, cache="paged", cache_dtype=FP8, block_size=32)
    # 32 pages of 32 tokens
    assert (fp8.used_cache_bytes, fp8.cache_bytes) == (4 * 1010 * per_token, 4 * 32 * 32 * per_token)
    int8 = profile_generate(llama_8b, 1000, 9, batch_size=4, samples=1, cache="static", cache_dtype=torch.int8)
    # a float of scale for the keys and one for the values of each head
    assert int8.cache_bytes == int8.used_cache_bytes == 4 * 1008 * (per_token + 2 * 32 * 8 * 4)


def test_a_cache_of_windows():
    mistral = build_model(load_target("hf:mistral-7b-v0.1").build)  # a window of 4,096 in every layer
    per_token = 2 * 32 * 8 * 128 * 2
    paged = profile_eager_passes(mistral, 3, 10_000)
    assert paged.used_cache_bytes == 3 * 4096 * per_token
    assert paged.cache_bytes == 3 * (4096 + 16) * per_token  # a window need not begin where a page does
    assert profile_eager_passes(mistral, 3, 10_000, cache="static").cache_bytes == 3 * 4096 * per_token


def test_a_cache_of_windows_in_every_second_layer():
    gemma = build_model(load_target("hf:gemma-2-2b").build)  # 26 layers, 13 with a window of 4,096; 4 heads of 256
    per_token = 2 * 4 * 256 * 2
    found = profile_eager_passes(gemma, 2, 8000, cache="static")
    assert found.cache_bytes == found.used_cache_bytes == 2 * per_token * 13 * (4096 + 8000)


def test_a_cache_of_latents():
    deepseek = build_model(load_target("hf:deepseek-v2-lite").build)
    per_token = 27 * (512 + 64) * 2  # layers, the latent's rank and the rotated channels: no heads
    found = profile_eager_passes(deepseek, 2, 1024)
    assert found.cache_bytes == found.used_cache_bytes == 2 * 1024 * per_token
    # the decode pass reads it once, and expands nothing: its products grow by those of 16 heads with rank and rotation
    longer = profile_eager_passes(deepseek, 2, 2048)
    assert longer.decode.flops - found.decode.flops == 2 * 1024 * 27 * 16 * 2 * (512 + 64 + 512)
    assert longer.decode.read_bytes - found.decode.read_bytes == 2 * 1024 * per_token


def test_room_of_pages_and_windows():
    paged = CacheForm("paged", block_size=16)
    assert [paged.room(tokens, None) for tokens in (1, 16, 17)] == [16, 16, 32]
    assert [paged.room(tokens, 32) for tokens in (16, 48, 1000)] == [16, 48, 48]
    assert CacheForm("static").room(1000, 32) == 32


# ---------------------------------------------------------------- the kernel that reads the cache


@pytest.mark.parametrize(("cache", "dtype"), [
    ("paged", None), ("paged", FP8), ("paged", torch.int8), ("static", FP8), ("static", torch.int8)])
def test_each_token_reads_what_is_there_and_nothing_is_copied(cache, dtype):
    p = profile_generate(small(), 7, 6, batch_size=2, samples=None, cache=cache, cache_dtype=dtype)
    width = 4 if dtype is None else 1
    kept = 2 * 2 * (8 * width + (4 if dtype is torch.int8 else 0)) * 2  # both, heads, channels and scale, layers
    assert [s.used_cache_bytes for s in p.steps] == [2 * kept * (7 + i) for i in range(6)]
    grown = [b.flops - a.flops for a, b in pairwise(p.steps[1:])]
    assert grown == [2 * 2 * 4 * 2 * (8 + 8)] * 4  # sequences, layers, heads, FLOPs of a product, channels of both
    read = [b.read_bytes - a.read_bytes for a, b in pairwise(p.steps[1:])]
    assert read == [2 * kept] * 4
    assert (p.cache, p.block_size) == (cache, 16 if cache == "paged" else None)
    assert GenerationProfile.from_json(p.to_json()) == p


def test_the_window_is_all_that_a_token_reads():
    p = profile_generate(small("Mistral", sliding_window=12), 8, 20, cache="paged", samples=None, block_size=4)
    assert {s.cache_bytes for s in p.steps} == {2 * 2 * 2 * 8 * 4 * 16}  # a window of 12 in pages of 4, and one more
    flops = [s.flops for s in p.steps[1:]]
    grown = [b - a for a, b in pairwise(flops)]
    assert grown[0] > 0 and set(grown[4:]) == {0}  # 8 + 4 tokens fill it
    some = profile_generate(small("Mistral", sliding_window=12), 8, 20, cache="paged", samples=2, block_size=4)
    assert [(s.flops, s.read_bytes) for s in some.steps] == [(s.flops, s.read_bytes) for s in p.steps]


def test_a_model_is_as_it_was_after_a_run():
    model = small()()
    before = model.config._attn_implementation
    profile_eager_passes(model, 2, 20)
    assert model.config._attn_implementation == before and model.training


def test_the_prefill_is_the_models_own():
    own, paged = (profile_generate(small(), 32, 2, cache=cache) for cache in ("dynamic", "paged"))
    assert own.steps[0].macs == paged.steps[0].macs and own.steps[1].macs == paged.steps[1].macs


@pytest.mark.parametrize(("build", "said"), [
    (lambda: GPT2(vocabulary=100, positions=64, hidden=32, layers=1, heads=4), "GPT2 is no model of transformers"),
    (lambda: load_target("hf:t5-small").build(), "T5ForConditionalGeneration has an encoder"),
    (lambda: load_target("hf:falcon-7b").build(), "the attention of FalconForCausalLM is its own code")])
def test_models_that_are_not_run_so(build, said):
    with pytest.raises(InputError) as error:
        profile_generate(build, 8, 2, cache="paged")
    assert said in str(error.value) and "give 'dynamic' or 'static' and no cache_dtype" in str(error.value)


def test_a_latent_of_packed_weights_is_expanded():
    from analyzer.recipe import Recipe

    options = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": None,
               "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "hidden_size": 128,
               "first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
    plain = profile_eager_passes(small("DeepseekV2", **options), 2, 64)
    packed = profile_eager_passes(lambda: Recipe(quantize="int8").build(small("DeepseekV2", **options)), 2, 64,
                             cache_dtype=torch.int8)
    assert plain.used_cache_bytes == 2 * 64 * 2 * (64 + 16) * 4
    assert packed.used_cache_bytes == 2 * 64 * 2 * (64 + 4 + 16 + 4)
    assert packed.decode.flops > plain.decode.flops


def test_the_kernel_cannot_be_run_on_data():
    with pytest.raises(NotImplementedError):
        cached_attention(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), 0, 0)


# ---------------------------------------------------------------- sequences


def test_a_point_splits_its_memory(llama_8b):
    p = profile_eager_passes(llama_8b, 16, 4096, device="h100_sxm", prefill_chunk=512)
    assert p.weight_bytes == 8_030_261_248 * 2
    assert p.cache_bytes == p.used_cache_bytes == 16 * 4096 * 131_072
    assert p.weight_bytes + p.cache_bytes + p.activation_bytes == p.peak_allocated_bytes
    assert (p.prefill.sequences, p.prefill.tokens, p.decode.sequences, p.decode.context_tokens) == (1, 512, 16, 4096)
    # memory bounds the decode pass: all weights but the table of tokens, and the cache, are read once
    read = p.weight_bytes - 128_256 * 4096 * 2 + p.cache_bytes
    assert p.decode.read_bytes == pytest.approx(read, rel=0.01)
    assert p.tokens_per_second == 16 / p.decode.seconds and p.fits and p.verdict.phase in ("prefill", "decode")


@pytest.mark.parametrize("options", [{"cache_dtype": FP8}, {"cache": "static", "block_size": 64}])
def test_the_largest_number_fits_and_the_next_does_not(options):
    build = small(max_position_embeddings=4096)
    capacity, options = ProfileOptions(capacity_bytes=2**29), {"prefill_chunk": 64, **options}
    found = max_sequences(build, 4096, options=capacity, **options)
    per_sequence = 4096 * 2 * 2 * 2 * 8 * (1 if "cache_dtype" in options else 4)
    assert 0.85 < found.sequences * per_sequence / 2**29 < 1  # cuBLAS takes 32 MiB
    assert found.at_limit.sequences == found.sequences and found.at_limit.out_of_memory is None
    assert found.beyond.sequences == found.sequences + 1 and found.beyond.out_of_memory is not None
    assert sum(nbytes for _, nbytes in found.split()) == found.capacity_bytes == 2**29
    assert found.tried < 16
    few = max_sequences(build, 4096, options=capacity, at_most=3, **options)
    assert few.sequences == 3 and few.beyond is None and "no more were asked for" in str(few)


def test_layers_of_states_have_one_for_each_sequence():
    build = small("Qwen3Next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
                  shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
                  linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
    one, three = (profile_eager_passes(build, n, 64) for n in (1, 3))
    of_tokens = 2 * 2 * 8 * 4  # keys and values, heads, channels, in one layer
    assert (one.used_cache_bytes, three.used_cache_bytes) == (64 * of_tokens, 3 * 64 * of_tokens)
    states = one.cache_bytes - one.used_cache_bytes
    assert states > 2 * 8 * 8 * 4 and three.cache_bytes == 3 * one.cache_bytes
    assert (three.prefill.sequences, three.prefill.tokens, three.decode.sequences) == (1, 63, 3)


def test_nothing_may_fit():
    found = max_sequences(small(), 1024, options=ProfileOptions(capacity_bytes=2**20))
    assert found.sequences == 0 and found.at_limit is None and "not even one sequence" in str(found)
    tiny = max_sequences(small(), 64, options=ProfileOptions(capacity_bytes=2**12))
    assert tiny.sequences == 0 and tiny.beyond.out_of_memory.phase == "setup"


def test_batches_beside_each_other():
    points = sweep_sequences(small(), [1, 2, 4], 512)
    assert [point.cache_bytes for point in points] == [n * 512 * 2 * 2 * 2 * 8 * 4 for n in (1, 2, 4)]
    # so small that a step is the host's time, whatever the number of sequences
    speeds = [point.tokens_per_second for point in points]
    assert speeds == pytest.approx([n * speeds[0] for n in (1, 2, 4)])
    rows = serving_table(points, "csv").splitlines()
    assert rows[0].startswith("sequences,decode_seconds,tokens_per_second") and rows[3].split(",")[0] == "4"
    assert "Tokens/s" in serving_table(points)


def test_weights_are_read_once_for_a_batch_and_a_cache_for_each_sequence():
    wide = small(hidden_size=8192, intermediate_size=32768, num_attention_heads=64, num_key_value_heads=64)
    one, two, four = (point.tokens_per_second for point in sweep_sequences(wide, [1, 2, 4], 2048))
    assert one < two < 2 * one and two < four < 2 * two


@pytest.mark.parametrize(("call", "said"), [
    (lambda: profile_eager_passes(small(), 0, 10), "profile_eager_passes(sequences=0): must be 1 or more"),
    (lambda: profile_eager_passes(small(), 1, 1), "context_tokens=1, prefill_chunk=2048): a context has 2 tokens"),
    (lambda: profile_eager_passes(small(), 1, 10, cache="dynamic"),
     "cache='dynamic'): a server takes its cache at once"),
    (lambda: profile_eager_passes(small(), 1, 10, block_size=0), "block_size=0): must be 1 token or more"),
    (lambda: sweep_sequences(small(), [], 10), "numbers=[]): give numbers of sequences"),
    (lambda: max_sequences(small(), 10, at_most=0), "at_most=0): must be 1 or more"),
    (lambda: max_sequences(small(), 10, memory_share=1.5), "memory_share=1.5): a share lies above 0"),
    (lambda: max_sequences(small(), 10, device="cpu"), "the memory of 'cpu' is not known"),
    (lambda: profile_eager_passes(load_target("hf:gpt2").build, 1, 2000), "has 1,024 positions"),
    (lambda: profile_generate(small(), 8, 2, cache_dtype=FP8), "cache_dtype=torch.float8_e4m3fn): what grows has"),
    (lambda: profile_generate(small(), 8, 2, cache="pages"), "must be one of 'dynamic', 'static', 'paged'")])
def test_errors(call, said):
    with pytest.raises(InputError) as error:
        call()
    assert said in str(error.value)


def test_command_line(capsys):
    gpt2 = ["generate", "hf:gpt2", "--prompt", "100", "--new-tokens", "28"]
    assert main([*gpt2, "--cache", "paged", "--cache-dtype", "int8", "--samples", "1", "--dtype", "bf16", "--engine",
                 "transformers"]) == 0
    out = capsys.readouterr().out
    assert "paged cache of int8 in pages of 16 tokens" in out and "decode, 27 tokens" in out and "fits on h200" in out
    assert main([*gpt2, "--max-sequences", "--device", "t4"]) == 0
    out = capsys.readouterr().out
    assert "sequences of 128 tokens fit" in out and "cache of tokens" in out and "fits, but barely, on t4" in out
    assert main([*gpt2, "--batches", "1,8"]) == 0
    assert "fit on h200: 1, 8 sequences of 128 tokens" in capsys.readouterr().out
    assert main(["generate", "hf:llama-3.1-8b", "--max-sequences", "--device", "t4"]) == 3
    assert "does NOT fit on t4" in capsys.readouterr().out
    for words, said in ((["--max-sequences", "--batches", "1"], "--max-sequences and --batches: give one of them"),
                        (["--cache", "paged", "--attention", "eager"], "--attention eager: a served cache"),
                        (["--block-size", "32"], "--block-size 32: only a paged cache has pages"),
                        (["--memory-share", "0.9"], "--memory-share 0.9: works only with --max-sequences"),
                        (["--max-sequences", "--json", "x.json"], "--json x.json: saves one generation, and")):
        assert main([*gpt2, *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*gpt2, "--batches", "1,x"])
    assert "argument --batches: '1,x': must be numbers between commas" in capsys.readouterr().err
