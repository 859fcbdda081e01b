"""Counts derived by hand."""
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import FlopCount, count_call
from analyzer.profilers.operator.attention import Window, visible_pairs

aten = torch.ops.aten
f16, c64, i64 = torch.float16, torch.complex64, torch.int64


def spec(*shape, dtype=torch.float32):
    return TensorSpec.of(shape, (1,) * len(shape), dtype, "cuda:0")


def of(op, *args, out=None, **kwargs):
    """The count of a call; ``out`` is a spec or several, by default the first tensor argument."""
    flat = [a for item in args for a in (item if isinstance(item, list) else [item]) if isinstance(a, TensorSpec)]
    outputs = (flat[0],) if out is None else (out,) if isinstance(out, TensorSpec) else tuple(out)
    return count_call(Signature(op, args, kwargs, tuple(flat), outputs))


def products(macs, more=0):
    return FlopCount(2 * macs + more, macs)


def meta(*shape, dtype=torch.float32, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


@pytest.mark.parametrize("count, macs", [
    (lambda: of(aten.mv.default, spec(3, 5), spec(5), out=spec(3)), 15),
    (lambda: of(aten.addmv.default, spec(3), spec(3, 5), spec(5)), 15),
    (lambda: of(aten.addr.default, spec(3, 4), spec(3), spec(4)), 12),
    (lambda: of(aten.addbmm.default, spec(3, 4), spec(2, 3, 5), spec(2, 5, 4)), 2 * 3 * 5 * 4),
    (lambda: of(aten.matmul.default, spec(6, 2, 3), spec(3, 4), out=spec(6, 2, 4)), 6 * 2 * 3 * 4),
    (lambda: of(aten.linear.default, spec(6, 2, 3), spec(4, 3), out=spec(6, 2, 4)), 6 * 2 * 3 * 4),
    (lambda: of(aten._grouped_mm.default, spec(20, 8), spec(4, 8, 6), spec(4, dtype=torch.int32), out=spec(20, 6)),
     20 * 8 * 6),
    (lambda: of(aten._grouped_mm.default, spec(4, 20, 8), spec(4, 8, 6), None, out=spec(4, 20, 6)), 4 * 20 * 8 * 6),
    (lambda: of(aten._grouped_mm.default, spec(20, 8), spec(8, 6), spec(4, dtype=torch.int32), out=spec(4, 20, 6)),
     20 * 8 * 6),
    (lambda: of(aten._scaled_grouped_mm.default, spec(32, 16), spec(4, 16, 48), spec(32), spec(4, 48), spec(4),
                out=spec(32, 48)),
     32 * 16 * 48),
    (lambda: of(aten._weight_int4pack_mm.default, spec(5, 64), spec(1, 4, 32, 4, dtype=torch.int32), 32, spec(2, 8, 2),
                out=spec(5, 8)),
     5 * 64 * 8),
    (lambda: of(aten.mm.default, spec(2, 3, dtype=c64), spec(3, 4, dtype=c64), out=spec(2, 4, dtype=c64)),
     4 * 2 * 3 * 4),
])
def test_matrix_products(count, macs):
    assert count() == products(macs)


def test_activated_product():
    args = aten._addmm_activation.default, spec(4), spec(2, 3), spec(3, 4)
    assert of(*args, out=spec(2, 4)) == products(24, 8)
    assert of(*args, out=spec(2, 4), use_gelu=True) == products(24, 72)


def test_bilinear(log_signatures):
    """Rows 5, features 2 of 3 × 4: forward 5·2·(3·4 + 4) multiply-adds."""
    a, b, w = (meta(*s, requires_grad=True) for s in ((5, 3), (5, 4), (2, 3, 4)))
    signatures = log_signatures(lambda: F.bilinear(a, b, w))
    assert [count_call(s) for s in signatures if s.op is aten._trilinear.default] == [products(5 * 2 * (12 + 4))]


# Convolutions: (input, weight, stride, groups, transposed, output, forward multiply-adds by hand).
CONVOLUTIONS = [
    ("grouped", (2, 8, 10, 10), (12, 4, 3, 3), 1, 2, False, (2, 12, 8, 8), 2 * 12 * 64 * 4 * 9),
    ("depthwise", (2, 8, 10, 10), (8, 1, 3, 3), 1, 8, False, (2, 8, 8, 8), 2 * 8 * 64 * 9),
    ("transposed", (2, 8, 5, 5), (8, 6, 2, 2), 2, 1, True, (2, 6, 10, 10), 2 * 8 * 25 * 6 * 4),
    ("grouped transposed", (2, 8, 5, 5), (8, 3, 2, 2), 2, 2, True, (2, 6, 10, 10), 2 * 8 * 25 * 3 * 4),
    ("depthwise transposed", (2, 8, 5, 5), (8, 1, 2, 2), 2, 8, True, (2, 8, 10, 10), 2 * 8 * 25 * 4),
    ("1-D", (3, 4, 9), (5, 4, 3), 1, 1, False, (3, 5, 7), 3 * 5 * 7 * 4 * 3),
    ("3-D", (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), 1, 1, False, (1, 3, 3, 3, 3), 3 * 27 * 2 * 8),
]


@pytest.mark.parametrize("name, x, w, stride, groups, transposed, out, macs", CONVOLUTIONS,
                         ids=[c[0] for c in CONVOLUTIONS])
def test_convolutions(name, x, w, stride, groups, transposed, out, macs):
    dims = len(x) - 2
    rest = [stride] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, groups
    x, w, out = spec(*x), spec(*w), spec(*out)
    assert of(aten.convolution.default, x, w, None, *rest, out=out) == products(macs)
    for mask in ([True, True, True], [False, True, True], [True, False, False], [False, False, True]):
        gradients = [g for g, wanted in zip((x, w, spec(out[1])), mask) if wanted]
        backward = of(aten.convolution_backward.default, out, x, w, [out[1]], *rest, mask, out=gradients)
        assert backward == products(macs * (mask[0] + mask[1]))


def test_vendor_convolutions():
    x, w, out = spec(2, 8, 10, 10), spec(12, 4, 3, 3), spec(2, 12, 8, 8)
    macs = 2 * 12 * 64 * 4 * 9
    pads = [0, 0], [1, 1], [1, 1], 2
    assert of(aten.cudnn_convolution.default, x, w, *pads, True, False, True, out=out) == products(macs)
    assert of(aten.mkldnn_convolution.default, x, w, None, *pads, out=out) == products(macs)
    assert of(aten.cudnn_convolution_add_relu.default, x, w, out, 1.0, None, *pads, out=out) == products(
        macs, 3 * out.numel)
    assert of(aten.cudnn_convolution_transpose.default, spec(2, 8, 5, 5), spec(8, 6, 2, 2), [0, 0], [0, 0], [2, 2],
              [1, 1], 1, True, False, True, out=spec(2, 6, 10, 10)) == products(2 * 8 * 25 * 6 * 4)


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 5), st.none() | st.integers(0, 5),
       st.booleans())
def test_visible_pairs_by_enumeration(queries, keys, left, right, bottom_right):
    def sees(i, j):
        at = i + (keys - queries if bottom_right else 0)
        return (left is None or j >= at - left) and (right is None or j <= at + right)

    expected = sum(sees(i, j) for i in range(queries) for j in range(keys))
    assert visible_pairs(queries, keys, Window(left, right, bottom_right)) == expected


# Batch 2, heads 4 (2 of key and value), 6 queries, 10 keys, head dimensions 8 and 16.
Q, K, V, OUT = spec(2, 4, 6, 8, dtype=f16), spec(2, 2, 10, 8, dtype=f16), spec(2, 2, 10, 16, dtype=f16), spec(
    2, 4, 6, 16, dtype=f16)
HEADS, DENSE, CAUSAL = 8, 60, 21  # pairs: all, and 1 + 2 + ... + 6 from the top left
FORWARD, BACKWARD = 8 + 16, 3 * 8 + 2 * 16  # multiply-adds a pair
LSE, SEED = spec(2, 4, 6), spec(dtype=i64)


def attention(per_pair, pairs=None):
    macs = HEADS * DENSE * per_pair
    return FlopCount(2 * macs, macs, None if pairs is None else 2 * HEADS * pairs * per_pair)


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_kernels(causal):
    pairs = CAUSAL if causal else None
    forward, backward = attention(FORWARD, pairs), attention(BACKWARD, pairs)
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    assert of(cpu.default, Q, K, V, 0.0, causal, out=(OUT, LSE)) == forward
    assert of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, OUT, Q, K, V, OUT, LSE, 0.0,
              causal) == backward
    # FlashAttention's is aligned to the bottom right (torch/nn/attention/bias.py): 5 + 6 + ... + 10 pairs
    flash, flash_backward = (attention(count, 45 if causal else None) for count in (FORWARD, BACKWARD))
    assert of(aten._scaled_dot_product_flash_attention.default, Q, K, V, 0.0, causal, False, out=(OUT, LSE)) == flash
    assert of(aten._scaled_dot_product_flash_attention_backward.default, OUT, Q, K, V, OUT, LSE, None, None, 6, 10, 0.0,
              causal, SEED, SEED) == flash_backward
    assert of(aten._scaled_dot_product_efficient_attention.default, Q, K, V, None, True, 0.0, causal,
              out=(OUT, LSE)) == forward
    assert of(aten._scaled_dot_product_efficient_attention_backward.default, OUT, Q, K, V, None, OUT, LSE, SEED, SEED,
              0.0, [True, True, True, False], causal) == backward
    assert of(aten._scaled_dot_product_cudnn_attention.default, Q, K, V, None, True, 0.0, causal,
              out=(OUT, LSE)) == forward
    assert of(aten._scaled_dot_product_cudnn_attention_backward.default, OUT, Q, K, V, OUT, LSE, SEED, SEED, None, None,
              None, 6, 10, 0.0, causal) == backward
    bias = spec(2, 4, 6, 10)
    assert of(aten._scaled_dot_product_fused_attention_overrideable.default, Q, K, V, bias, 0.0, causal,
              out=(OUT, LSE)) == forward
    assert of(aten._scaled_dot_product_fused_attention_overrideable_backward.default, OUT, Q, K, V, bias, [True] * 4,
              OUT, LSE, None, None, 6, 10, 0.0, causal, SEED, SEED) == backward


def test_a_kernel_that_calls_its_tensors_by_their_first_letters():
    assert of(aten._triton_scaled_dot_attention.default, Q, K, V, 0.0, out=OUT) == attention(FORWARD)


def test_raw_kernels_hold_heads_inside():
    """[batch, sequence, heads, dim]; FlashAttention's causal mask ends at the bottom right: 5 + 6 + ... + 10 pairs."""
    q, k, v, out = (spec(s[0], s[2], s[1], s[3], dtype=f16) for s in (Q, K, V, OUT))
    assert of(aten._flash_attention_forward.default, q, k, v, None, None, 6, 10, 0.0, False, False,
              out=(out, LSE)) == attention(FORWARD)
    assert of(aten._flash_attention_forward.default, q, k, v, None, None, 6, 10, 0.0, True, False,
              out=(out, LSE)) == attention(FORWARD, 45)
    assert of(aten._flash_attention_forward.default, q, k, v, None, None, 6, 10, 0.0, True, False, out=(out, LSE),
              window_size_left=1, window_size_right=0) == attention(FORWARD, 12)
    assert of(aten._flash_attention_backward.default, out, q, k, v, out, LSE, None, None, 6, 10, 0.0, True, SEED,
              SEED) == attention(BACKWARD, 45)
    for mask_type, pairs in ((0, None), (1, CAUSAL), (2, 45)):
        assert of(aten._efficient_attention_forward.default, q, k, v, None, None, None, None, None, 0.0, mask_type,
                  True, out=(out, LSE)) == attention(FORWARD, pairs)
        assert of(aten._efficient_attention_backward.default, out, q, k, v, None, out, None, None, 6, 10, LSE, 0.0,
                  SEED, SEED, mask_type, False) == attention(BACKWARD, pairs)


def test_packed_sequences():
    """Sequences of 10, 8 and 6 in 24 positions, 4 heads of 8: each attends to itself, 100 + 64 + 36 pairs."""
    q, offsets = spec(24, 4, 8, dtype=f16), spec(4, dtype=torch.int32)
    known = offsets.with_values((0, 10, 18, 24))
    options = (10, 10, 0.0, False, False)
    assert of(aten._flash_attention_forward.default, q, q, q, known, known, *options, out=q) == products(4 * 200 * 16)
    assert of(aten._flash_attention_forward.default, q, q, q, offsets, offsets, *options, out=q) is None


def test_multi_head_attention():
    """Batch 2, length 5, width 16: projections 4·(2·5)·16·16, attention 2·(2·5·5·16)."""
    x, qkv, proj = spec(2, 5, 16), spec(48, 16), spec(16, 16)
    b3, b1 = spec(48), spec(16)
    attention_macs = 4 * 10 * 256 + 2 * 2 * 25 * 16
    assert of(aten._native_multi_head_attention.default, x, x, x, 16, 4, qkv, b3, proj, b1, None,
              False) == products(attention_macs)
    # Feed-forward of 64: 2·10·16·64. ReLU 640, two residual sums 2·160, two layer norms 2·7·160.
    count = of(aten._transformer_encoder_layer_fwd.default, x, 16, 4, qkv, b3, proj, b1, False, False, 1e-5, b1, b1, b1,
               b1, spec(64, 16), spec(64), spec(16, 64), b1)
    assert count == products(attention_macs + 2 * 10 * 16 * 64, 640 + 320 + 2240)


@pytest.mark.parametrize("kind, mode, gates, cell, cell_backward",
                         [("LSTM", 2, 4, 13, 22), ("GRU", 3, 3, 11, 16), ("tanh", 1, 1, 2, 3)])
def test_recurrent_layers(kind, mode, gates, cell, cell_backward):
    """Two layers in two directions, time 7, batch 3, 10 features, hidden 5: the second layer's input is 10 again."""
    x, h = spec(7, 3, 10), spec(4, 3, 5)
    weights = [spec(gates * 5, 10), spec(gates * 5, 5), spec(gates * 5), spec(gates * 5)] * 4
    matrices = 21 * 4 * gates * 5 * (10 + 5)
    cells = 21 * 5 * 4
    settings = mode, 5, 0, 2, False, 0.0, True, True, [], None
    assert of(aten._cudnn_rnn.default, x, weights, 4, None, h, h, *settings) == products(matrices, cell * cells)
    for of_weights in (True, False):
        mask = [True, True, True, of_weights]
        count = of(aten._cudnn_rnn_backward.default, x, weights, 4, spec(1), h, h, x, x, None, None, *settings, spec(1),
                   mask)
        assert count == products((1 + of_weights) * matrices, cell_backward * cells)


def test_projected_lstm():
    """Projection 2 of hidden 5: w_ih [20, 10], w_hh [20, 2], w_hr [2, 5]."""
    x = spec(7, 3, 10)
    weights = [spec(20, 10), spec(20, 2), spec(20), spec(20), spec(2, 5)]
    count = of(aten._cudnn_rnn.default, x, weights, 5, None, spec(1, 3, 2), spec(1, 3, 5), 2, 5, 2, 1, False, 0.0, True,
               False, [], None)
    assert count == products(21 * (200 + 40 + 10), 13 * 21 * 5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_lstm_on_real_tensors(log_signatures, batch_first):
    """The CPU's fused layers: the same multiply-adds, forward and backward."""
    lstm = torch.nn.LSTM(10, 5, num_layers=2, bidirectional=True, batch_first=batch_first)
    signatures = log_signatures(lambda: lstm(torch.randn(7, 3, 10, requires_grad=True))[0].sum().backward())
    forward, backward = (sum(count_call(s).macs for s in signatures if s.op is op)
                         for op in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default))
    macs = 21 * 4 * 4 * 5 * (10 + 5)
    assert (forward, backward) in [(macs, 2 * macs), (0, 0)]  # builds without oneDNN run separate products
    if not forward:
        assert sum(count_call(s).macs for s in signatures) == 3 * macs


def test_fused_cells():
    gates, state, bias = spec(3, 20), spec(3, 5), spec(20)
    assert of(aten._thnn_fused_lstm_cell.default, gates, gates, state, bias, bias,
              out=(state, state, gates)) == FlopCount(15 * 21)
    assert of(aten._thnn_fused_lstm_cell_backward_impl.default, state, state, state, state, gates,
              True) == FlopCount(15 * 26)
    gates, bias = spec(3, 15), spec(15)
    assert of(aten._thnn_fused_gru_cell.default, gates, gates, state, bias, bias,
              out=(state, gates)) == FlopCount(15 * 17)
    assert of(aten._thnn_fused_gru_cell_backward.default, state, spec(3, 25), True) == FlopCount(15 * 22)


X = spec(4, 6)


@pytest.mark.parametrize("count, flops", [
    # Pointwise, 24 elements.
    (lambda: of(aten.add.Tensor, X, X), 24),
    (lambda: of(aten.add.Tensor, X, X, alpha=2), 48),
    (lambda: of(aten.mul.Tensor, spec(4, 1), spec(6), out=X), 24),
    (lambda: of(aten.clamp.default, X, 0, None), 24),
    (lambda: of(aten.clamp.default, X, 0, 1), 48),
    (lambda: of(aten.gelu.default, X), 24 * 5),
    (lambda: of(aten.gelu.default, X, approximate="tanh"), 24 * 9),
    (lambda: of(aten.addcmul_.default, X, X, X), 24 * 3),
    (lambda: of(aten.native_dropout.default, X, 0.1, True, out=(X, spec(4, 6, dtype=torch.bool))), 24 * 2),
    (lambda: of(aten.native_dropout.default, X, 0.1, False, out=(X, spec(4, 6, dtype=torch.bool))), 0),
    (lambda: of(aten.threshold_backward.default, X, X, 0), 0),
    # Complex: a sum is 2, a product 6, a product with a real 2, a modulus 4.
    (lambda: of(aten.add.Tensor, spec(5, dtype=c64), spec(5, dtype=c64)), 10),
    (lambda: of(aten.mul.Tensor, spec(5, dtype=c64), spec(5, dtype=c64)), 30),
    (lambda: of(aten.mul.Tensor, spec(5, dtype=c64), spec(5)), 10),
    (lambda: of(aten.abs.default, spec(5, dtype=c64), out=spec(5)), 20),
    # Reductions and scans.
    (lambda: of(aten.sum.default, X, out=spec()), 24),
    (lambda: of(aten.var.correction, X, [1], out=spec(4)), 96),
    (lambda: of(aten.max.dim, X, 1, out=(spec(4), spec(4, dtype=i64))), 24),
    (lambda: of(aten.max.other, spec(4, 1), spec(6), out=X), 24),
    (lambda: of(aten.any.default, X, out=spec(dtype=torch.bool)), 0),
    (lambda: of(aten.linalg_vector_norm.default, X, out=spec()), 48),
    (lambda: of(aten.linalg_vector_norm.default, X, 3, out=spec()), 72),
    (lambda: of(aten.sort.default, spec(3, 8), 0), 24 * 2),
    (lambda: of(aten.sort.stable, spec(3, 8), stable=True, dim=1), 24 * 3),
    (lambda: of(aten.topk.default, spec(3, 8), 2), 24 * 3),
    (lambda: of(aten.searchsorted.Tensor, spec(7), spec(5), out=spec(5, dtype=i64)), 15),
    (lambda: of(aten._softmax.default, X, 1, False), 120),
    # Normalizations.
    (lambda: of(aten.native_layer_norm.default, X, [6], spec(6), spec(6), 1e-5), 24 * 7),
    (lambda: of(aten.native_layer_norm.default, X, [6], None, None, 1e-5), 24 * 5),
    (lambda: of(aten.native_layer_norm_backward.default, X, X, [6], spec(4), spec(4), spec(6), spec(6),
                [True, True, True]), 24 * 13),
    (lambda: of(aten.native_layer_norm_backward.default, X, X, [6], spec(4), spec(4), spec(6), spec(6),
                [False, True, True]), 24 * 5),
    (lambda: of(aten.native_batch_norm.default, spec(2, 3, 4), spec(3), spec(3), spec(3), spec(3), True, 0.1, 1e-5),
     24 * 7),
    (lambda: of(aten.native_batch_norm.default, spec(2, 3, 4), spec(3), spec(3), spec(3), spec(3), False, 0.1, 1e-5),
     24 * 4),
    (lambda: of(aten._native_batch_norm_legit_functional.default, spec(2, 3, 4), None, None, spec(3), spec(3), True,
                0.1, 1e-5), 24 * 5),
    (lambda: of(aten.native_group_norm.default, spec(2, 3, 4), None, None, 2, 3, 4, 3, 1e-5), 24 * 5),
    (lambda: of(aten._fused_rms_norm.default, X, [6], spec(6), None), 24 * 4),
    # Pooling: k to each output; adaptive windows of 7 to 3 hold 3 + 3 + 3 elements.
    (lambda: of(aten.max_pool2d_with_indices.default, spec(1, 2, 8, 8), [3, 3], [2, 2], [1, 1], out=spec(1, 2, 4, 4)),
     32 * 9),
    (lambda: of(aten.avg_pool2d_backward.default, spec(1, 2, 4, 4), spec(1, 2, 8, 8), [2, 2], [2, 2], [0, 0], False,
                True, None), 32 * 5),
    (lambda: of(aten._adaptive_avg_pool2d.default, spec(2, 7, 7), [3, 3], out=spec(2, 3, 3)), 2 * 81),
    (lambda: of(aten._adaptive_avg_pool2d_backward.default, spec(2, 3, 3), spec(2, 7, 7)), 18 + 2 * 81),
    # Interpolation.
    (lambda: of(aten.upsample_bilinear2d.vec, spec(1, 2, 4, 4), [8, 8], False, None, out=spec(1, 2, 8, 8)), 128 * 9),
    (lambda: of(aten.upsample_nearest2d.default, spec(1, 2, 4, 4), [8, 8], out=spec(1, 2, 8, 8)), 0),
    (lambda: of(aten.upsample_nearest2d_backward.default, spec(1, 2, 8, 8), [8, 8], [1, 2, 4, 4], out=spec(1, 2, 4, 4)),
     128),
    # One lerp a sample (7 in 2-D), and for each of 12 points 10 + 4.
    (lambda: of(aten.grid_sampler_2d.default, spec(1, 2, 4, 4), spec(1, 3, 4, 2), 0, 0, False, out=spec(1, 2, 3, 4)),
     24 * 7 + 12 * 14),
    # Sums by index.
    (lambda: of(aten.embedding.default, spec(9, 6), spec(4, dtype=i64), out=X), 0),
    (lambda: of(aten.embedding_dense_backward.default, X, spec(4, dtype=i64), 9, -1, False, out=spec(9, 6)), 24),
    (lambda: of(aten.index_add.default, spec(9, 6), 0, spec(4, dtype=i64), X), 24),
    (lambda: of(aten.scatter_add.default, X, 1, spec(4, 2, dtype=i64), spec(4, 2)), 8),
    (lambda: of(aten.scatter.reduce, X, 1, spec(4, 2, dtype=i64), spec(4, 2), reduce="add"), 8),
    (lambda: of(aten.index_put_.default, X, [spec(3, dtype=i64)], spec(3, 6), True), 18),
    (lambda: of(aten.index_put_.default, X, [spec(3, dtype=i64)], spec(3, 6)), 0),
    # Embedding bags: 5 rows of 6.
    (lambda: of(aten._embedding_bag.default, spec(9, 6), spec(5, dtype=i64), spec(2, dtype=i64), out=spec(2, 6)), 30),
    # Losses.
    (lambda: of(aten.mse_loss.default, X, X, out=spec()), 72),
    (lambda: of(aten.mse_loss_backward.default, spec(), X, X, 1), 72),
    (lambda: of(aten.nll_loss_forward.default, X, spec(4, dtype=i64), None, 1, -100, out=(spec(), spec())), 8),
    (lambda: of(aten.binary_cross_entropy_with_logits.default, X, X, out=spec()), 240),
    # Fourier: 5 n log₂ n; half for real; a product for each real number where scaled.
    (lambda: of(aten._fft_c2c.default, spec(3, 8, dtype=c64), [1], 0, True), 3 * 5 * 8 * 3),
    (lambda: of(aten._fft_r2c.default, spec(3, 8), [1], 0, True, out=spec(3, 5, dtype=c64)), 3 * 60),
    (lambda: of(aten._fft_c2r.default, spec(3, 5, dtype=c64), [1], 2, 8, out=spec(3, 8)), 3 * 60 + 24),
    (lambda: of(aten._fft_c2c.default, spec(4, 8, dtype=c64), [0, 1], 0, True), 5 * 32 * 5),
    # Linear algebra, n = 6 (n³ = 216).
    (lambda: of(aten.linalg_cholesky_ex.default, spec(2, 6, 6)), 2 * 72),
    (lambda: of(aten._linalg_solve_ex.default, spec(6, 6), spec(6, 2), out=spec(6, 2)), 144 + 2 * 36 * 2),
    (lambda: of(aten.linalg_solve_triangular.default, spec(6, 6), spec(6, 2), upper=True, out=spec(6, 2)), 72),
    (lambda: of(aten.cholesky_solve.default, spec(6, 2), spec(6, 6)), 144),
    (lambda: of(aten.linalg_qr.default, spec(6, 6), "r"), 432 - 144),
    (lambda: of(aten._linalg_eigh.default, spec(6, 6), "L", False), 288),
    (lambda: of(aten._cdist_forward.default, spec(3, 4), spec(5, 4), 2.0, None, out=spec(3, 5)), 15 * 4 * 3),
    # Optimizers, 8 elements.
    (lambda: of(aten._fused_adamw_.default, [spec(3), spec(5)], [], [], [], [], [], lr=1e-3, beta1=0.9, beta2=0.99,
                weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False, out=()), 8 * 14),
    (lambda: of(aten._fused_adam_.default, [spec(3), spec(5)], [], [], [], [], [], lr=1e-3, beta1=0.9, beta2=0.99,
                weight_decay=0.0, eps=1e-8, amsgrad=True, maximize=False, out=()), 8 * 14),
    (lambda: of(aten._fused_sgd_.default, [spec(3), spec(5)], [], [], weight_decay=0.1, momentum=0.9, lr=0.1,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False, out=()), 8 * 6),
    (lambda: of(aten._amp_foreach_non_finite_check_and_unscale_.default, [spec(3), spec(5)], spec(1), spec(1), out=()),
     8),
])
def test_arithmetic_without_multiply_accumulate(count, flops):
    assert count() == FlopCount(flops)


def test_weighted_embedding_bag_is_a_multiply_accumulate():
    count = of(aten._embedding_bag.default, spec(9, 6), spec(5, dtype=i64), spec(2, dtype=i64), False, 0, False,
               spec(5), out=spec(2, 6))
    assert count == products(30)


def test_torchvision():
    def count(name, *args, out):
        from analyzer.profilers.flop_registry import register_flop_impl

        return register_flop_impl.find(f"torchvision::{name}")(*args, out=out)

    assert count("nms", spec(10, 4), spec(10), 0.5, out=spec(3, dtype=i64)) == 45 * 12 + 30
    rois = spec(5, 5)
    assert count("roi_align", spec(1, 8, 9, 9), rois, 1.0, 7, 7, 2, False, out=spec(5, 8, 7, 7)) == 5 * 8 * 49 * 4 * 8
    assert count("roi_align", spec(1, 8, 9, 9), rois, 1.0, 7, 7, -1, False, out=spec(5, 8, 7, 7)) is None
    x, w, out = spec(1, 4, 6, 6), spec(5, 4, 3, 3), spec(1, 5, 4, 4)
    deform = count("deform_conv2d", x, w, spec(1, 18, 4, 4), spec(1, 0), spec(5), 1, 1, 0, 0, 1, 1, 1, 1, False,
                   out=out)
    assert deform == products(prod(out) * 36, 4 * 9 * 16 * 7)


def test_counts_add():
    assert FlopCount(2, 1) + FlopCount(3) == FlopCount(5, 1)
    assert FlopCount(10, 5, 4) + FlopCount(3) == FlopCount(13, 5, 7)
    assert FlopCount(10, 5, 4).executed == 4 and FlopCount(3).executed == 3
