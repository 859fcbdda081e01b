"""Which sizes of an attention operator go to its model."""
from __future__ import annotations

import pytest
import torch

from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import find_rule

aten = torch.ops.aten
H200 = find_device("h200")


def spec(*shape, dtype=torch.bfloat16):
    stride = [1]
    for size in shape[:0:-1]:
        stride.insert(0, stride[0] * size)
    return TensorSpec.of(shape, tuple(stride), dtype, "cuda:0")


def rule_time(op, *args, **kwargs):
    return find_rule(op)(Signature(op, args, kwargs, (), ()), H200)


def expected(kernel, q_len=128, kv_len=128, causal=False, **options):
    sizes = {**dict(batch=2, heads=8, kv_heads=8, head_dim=64, value_dim=64), **options}
    return attention_time(kernel, **sizes, q_len=q_len, kv_len=kv_len, dtype="bfloat16",
                          device=H200, causal=causal)


FIRST, INSIDE, PACKED = spec(2, 8, 128, 64), spec(2, 128, 8, 64), spec(256, 8, 64)
LSE, SEED, OFFSETS = spec(2, 8, 128, dtype=torch.float32), spec(2, dtype=torch.int64), spec(3, dtype=torch.int32)
MASK = spec(2, 8, 128, 128)
CASES = [
    (aten._scaled_dot_product_flash_attention.default, (FIRST,) * 3 + (0.0, True), "flash", dict(causal=True)),
    (aten._scaled_dot_product_flash_attention.default, (FIRST,) * 3 + (0.1,), "flash", dict(dropout=True)),
    (aten._scaled_dot_product_efficient_attention.default, (FIRST,) * 3 + (MASK, True, 0.0, False), "efficient",
     dict(masked=True)),
    (aten._scaled_dot_product_cudnn_attention.default, (FIRST,) * 3 + (None, True, 0.0, True), "cudnn",
     dict(causal=True)),
    (aten._scaled_dot_product_cudnn_attention.default, (FIRST, spec(2, 2, 512, 64), spec(2, 2, 512, 64), None, False),
     "cudnn", dict(kv_heads=2, kv_len=512)),
    (aten._scaled_dot_product_cudnn_attention_backward.default,
     (FIRST,) * 5 + (LSE, SEED, SEED, None, None, None, 128, 128, 0.1, True), "cudnn",
     dict(causal=True, backward=True, dropout=True)),
    (aten._cudnn_attention_forward.default, (FIRST,) * 3 + (None, None, None, 128, 128, True, 0.0, False), "cudnn", {}),
    (aten._cudnn_attention_backward.default,
     (FIRST,) * 5 + (LSE, SEED, SEED, MASK, None, None, 128, 128, 0.0, False), "cudnn",
     dict(backward=True, masked=True)),
    (aten._scaled_dot_product_flash_attention_backward.default,
     (FIRST,) * 5 + (LSE, OFFSETS, OFFSETS, 128, 128, 0.0, True, SEED, SEED), "flash",
     dict(causal=True, backward=True)),
    (aten._scaled_dot_product_efficient_attention_backward.default,
     (FIRST,) * 4 + (None, FIRST, LSE, SEED, SEED, 0.0, [True] * 4, True), "efficient",
     dict(causal=True, backward=True)),
    (aten._flash_attention_forward.default, (INSIDE,) * 3 + (None, None, 128, 128, 0.0, True, False), "flash",
     dict(causal=True)),
    (aten._flash_attention_forward.default, (PACKED,) * 3 + (OFFSETS, OFFSETS, 128, 128, 0.0, True, False), "flash",
     dict(causal=True)),
    (aten._efficient_attention_forward.default, (INSIDE,) * 3 + (None, None, None, 128, 128, 0.0, 1), "efficient",
     dict(causal=True)),
    (aten._efficient_attention_backward.default,
     (INSIDE,) * 4 + (None, INSIDE, None, None, 128, 128, LSE, 0.1, SEED, SEED, 0, False), "efficient",
     dict(backward=True, dropout=True)),
    (aten._flash_attention_backward.default,
     (INSIDE,) * 5 + (LSE, None, None, 128, 128, 0.0, False, SEED, SEED), "flash", dict(backward=True)),
    (aten._scaled_dot_product_fused_attention_overrideable.default, (FIRST,) * 3 + (None, 0.0, True), "flash",
     dict(causal=True)),
]


@pytest.mark.parametrize(("op", "args", "kernel", "options"), CASES)
def test_sizes_and_options_are_read_from_the_arguments(op, args, kernel, options):
    assert rule_time(op, *args) == expected(kernel, **options)


def test_a_window_and_used_keys_are_read_from_keywords():
    got = rule_time(aten._flash_attention_forward.default, *(INSIDE,) * 3, None, None, 128, 128, 0.0, True, False,
                    window_size_left=32, window_size_right=0)
    assert got == expected("flash", causal=True, window=32)


def test_causal_keys_right_of_the_last_query_are_not_read():
    long = spec(2, 8, 4096, 64)
    got = rule_time(aten._scaled_dot_product_flash_attention.default, FIRST, long, long, 0.0, True)
    assert got == expected("flash", causal=True)


CACHE = spec(4, 1000, 2, 64)


def decode(query, keys, window=0, **options):
    import analyzer.tools.generation  # noqa: F401  # which defines the operator
    got = rule_time(torch.ops.analyzer.cached_attention.default, query, keys, keys, window, 0)
    batch, new, heads, size = query
    return got, expected("paged", new, keys[1], True, batch=batch, heads=heads, kv_heads=keys[2], head_dim=size,
                         value_dim=size, stores_keys=False, **options)


def test_a_serving_engine_attends_to_the_used_part_of_its_cache():
    for query in (spec(4, 1, 8, 64), spec(4, 128, 8, 64)):
        got, wanted = decode(query, CACHE, kv_item_bytes=2)
        assert got == wanted


def test_latents_are_read_once():
    import analyzer.tools.generation  # noqa: F401  # which defines the operator
    got = rule_time(torch.ops.analyzer.latent_attention.default, spec(64, 1, 16, 576), spec(64, 16384, 1, 512),
                    spec(64, 16384, 1, 64), 512)
    least = 64 * 16384 * 576 * 2 / H200.memory_bandwidth
    assert least < got.seconds < 2 * least


def test_pages_are_read_up_to_the_longest_sequence():
    """Four pages of 256 keys and a query for each of two sequences."""
    query, pages = spec(2, 8, 64), spec(8, 256, 2, 64)
    got = rule_time(aten._flash_attention_forward.default, query, pages, pages, OFFSETS, OFFSETS, 1, 1000, 0.0, True,
                    False, block_table=spec(2, 4, dtype=torch.int32))
    assert got == expected("flash", 1, 1000, True, kv_heads=2)


def test_packed_sequences_are_as_many_as_their_tokens_fill():
    """300 tokens in sequences of up to 100: three full ones, whatever the number of offsets."""
    packed = spec(300, 8, 64)
    got = rule_time(aten._flash_attention_forward.default, *(packed,) * 3, spec(9, dtype=torch.int32),
                    spec(9, dtype=torch.int32), 100, 100, 0.0, False, False)
    assert got == expected("flash", 100, 100, batch=3)
