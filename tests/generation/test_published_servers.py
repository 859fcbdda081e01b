"""Beside what vLLM logged of itself: weights, bytes of a token in the cache, the peak of its memory profiling run.

Logs print GiB (some call them GB) to two or four digits.
"""
from functools import partial

import pytest

from analyzer.api.argument import build_model
from analyzer.recipe import Recipe
from analyzer.tools.generation import profile_eager_passes
from analyzer.zoo.target import load_target

GIB = 2**30


def serve(name, **options):
    return profile_eager_passes(build_model(load_target(f"hf:{name}").build), 1, 2049, **options)


@pytest.mark.parametrize(("name", "quantize", "gib", "within"), [
    # vllm-project/vllm issue 10517: "Loading model weights took 14.9888 GB"; its table of rotations is a buffer
    ("llama-3.1-8b-instruct", None, 14.9888, 0.003),
    # pull request 10511, meta-llama/Meta-Llama-3-8B: "model weights take 14.96GiB"
    ("llama-3-8b", None, 14.96, 0.0005),
    # pull request 12569, Meta-Llama-3.1-70B-Instruct-quantized.w8a8: "Loading model weights took 67.7229 GB"
    ("llama-3.1-70b-instruct", "int8", 67.7229, 0.001)])
def test_weights(name, quantize, gib, within):
    model = build_model(partial(Recipe(quantize=quantize).build, load_target(f"hf:{name}").build))
    assert sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) == pytest.approx(
        gib * GIB, rel=within)


@pytest.mark.parametrize(("name", "gib", "tokens", "held_here", "within"), [
    # issue 10517, Llama-3.1-8B-Instruct on one device: "kv_cache_size=3.81GiB", "GPU blocks: 1952" of 16 tokens
    ("llama-3.1-8b-instruct", 3.81, 1952 * 16, 1, 0.0015),
    # pull request 20665, DeepSeek-V2-Lite in 2 stages, of which the longer has 14 of 27 layers, all latents on each:
    # "Available KV cache memory: 12.13 GiB", "GPU KV cache size: 807,792 tokens"
    ("deepseek-v2-lite", 12.13, 807_792, 14 / 27, 0.0005)])
def test_bytes_of_a_token_in_the_cache(name, gib, tokens, held_here, within):
    found = serve(name, cache="static")
    assert found.used_cache_bytes / 2049 * held_here == pytest.approx(gib * GIB / tokens, rel=within)


@pytest.mark.parametrize(("tokens", "peak"), [(20_000, 17.06), (29_000, 17.98)])
def test_peak_of_a_long_prompt(tokens, peak):
    """Issue 10517, Llama-3.1-8B-Instruct on an RTX 3090, which reads a prompt of `max_model_len` tokens to see what it
    takes: "peak_torch_memory=17.06GiB" and "17.98GiB". Our MLP is that of transformers: it keeps one more product than
    vLLM's, which is written in place.
    """
    model = build_model(load_target("hf:llama-3.1-8b-instruct").build)
    found = profile_eager_passes(model, 1, tokens + 1, prefill_chunk=tokens, device="rtx_4090")
    without_cache = found.prefill.peak_allocated_bytes - found.cache_bytes
    assert without_cache == pytest.approx(peak * GIB, rel=0.0125)
    assert without_cache > peak * GIB
