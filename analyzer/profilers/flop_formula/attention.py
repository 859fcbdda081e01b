"""FLOPs of attention and of recurrent networks."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from analyzer.meta.spec import TensorSpec as Spec

from .pointwise import GELU_FLOPS
from .reduction import LAYER_NORM_FLOPS
from .registration import GATES, FlopCount, Formula, multiply_adds, register_each, register_flop_impl

# Attention kernels: their matrix products, as torch.utils.flop_counter counts them (the softmax between adds nothing).
#
# Forward: scores = q·kᵀ and out = p·v. Backward: scores again (no kernel saves them), and the gradients of p, v, q and
# k.
# ``flops`` is dense; ``executed_flops`` counts the (query, key) pairs that a causal or sliding-window mask leaves,
# to the element: kernels skip whole tiles only, so they execute a little more. A mask given as a tensor hides nothing,
# since kernels compute under it.

@dataclass(frozen=True)
class Window:
    """Keys a query may see: from ``left`` before its own position to ``right`` after it (None: no limit).

    Query i stands at key position i, or i + keys - queries where ``bottom_right``.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @property
    def hides(self) -> bool:
        """Whether a query sees fewer keys than there are."""
        return self.left is not None or self.right is not None


DENSE = Window()
CAUSAL = Window(right=0)


def sum_of_clamped(start: int, count: int, limit: int) -> int:
    """Sum over i < count of min(max(start + i, 0), limit), in closed form.

    >>> sum_of_clamped(-2, 6, 2)  # 0 0 0 1 2 2
    5
    """
    def below(t: int) -> int:  # the sum for i from 0 while i < t
        rising = min(max(t, 0), limit + 1)
        return rising * (rising - 1) // 2 + limit * (max(t, 0) - rising)

    return below(start + count) - below(start)


def visible_pairs(queries: int, keys: int, window: Window) -> int:
    """(query, key) pairs that the window leaves.

    >>> visible_pairs(4, 4, CAUSAL), visible_pairs(4, 4, DENSE), visible_pairs(4, 4, Window(left=1, right=0))
    (10, 16, 7)
    >>> visible_pairs(2, 5, Window(right=0, bottom_right=True)), visible_pairs(2, 5, CAUSAL)
    (9, 3)
    """
    offset = keys - queries if window.bottom_right else 0
    ends = queries * keys if window.right is None else sum_of_clamped(offset + window.right + 1, queries, keys)
    starts = 0 if window.left is None else sum_of_clamped(offset - window.left, queries, keys)
    return ends - starts


@dataclass(frozen=True)
class Attention:
    """batch × heads problems of ``queries`` by ``keys``; grouped-query heads are query heads."""

    batch_heads: int
    queries: int
    keys: int
    qk_dim: int
    v_dim: int

    @classmethod
    def of(cls, query: Spec, key: Spec, value: Spec) -> Attention:
        """From [batch..., heads, sequence, dim]."""
        return cls(prod(query[:-2]), query[-2], key[-2], query[-1], value[-1])

    @classmethod
    def heads_inside(cls, query: Spec, key: Spec, value: Spec) -> Attention:
        """From [batch, sequence, heads, dim], the layout of the raw flash and memory-efficient kernels."""
        return cls(query[0] * query[2], query[1], key[1], query[3], value[3])

    def forward(self, like: Spec, window: Window = DENSE) -> FlopCount:
        """Run the kernel and keep what its backward pass needs."""
        return self._products(self.qk_dim + self.v_dim, like, window)

    def backward(self, like: Spec, window: Window = DENSE) -> FlopCount:
        """The gradients of the inputs."""
        return self._products(3 * self.qk_dim + 2 * self.v_dim, like, window)

    def _products(self, macs_per_pair: int, like: Spec, window: Window) -> FlopCount:
        dense = multiply_adds(self.batch_heads * self.queries * self.keys * macs_per_pair, like)
        if not window.hides:
            return dense
        pairs = visible_pairs(self.queries, self.keys, window)
        return FlopCount(dense.flops, dense.macs, multiply_adds(self.batch_heads * pairs * macs_per_pair, like).flops)


def masked(is_causal: bool) -> Window:
    """`is_causal` of scaled_dot_product_attention: aligned to the top left, whatever the lengths."""
    return CAUSAL if is_causal else DENSE


def forward_of(causal_at: int, count: Callable[..., FlopCount] = Attention.forward) -> Formula:
    """The formula of a kernel of [batch, heads, sequence, dim] tensors (query, key, value, ...) whose `is_causal` is
    argument ``causal_at``.

    >>> q = Spec.of((1, 2, 4, 8), (64, 32, 8, 1), torch.float16, "cuda:0")
    >>> forward_of(causal_at=4)(q, q, q, 0.0, True)
    FlopCount(flops=1024, macs=512, executed_flops=640)
    """
    def sdpa_flops(query: Spec, key: Spec, value: Spec, *rest: Any, is_causal: bool = False, **_: Any) -> FlopCount:
        hides = rest[causal_at - 3] if len(rest) > causal_at - 3 else is_causal
        return count(Attention.of(query, key, value), query, masked(hides))

    return sdpa_flops


def backward_of(causal_at: int) -> Formula:
    """The formula of a backward kernel (grad_out, query, key, value) whose `is_causal` is argument ``causal_at``."""
    after_grad = forward_of(causal_at - 1, Attention.backward)
    return lambda grad_out, *args, **options: after_grad(*args, **options)


def packed_lengths(cumulative_q: Spec, cumulative_k: Spec | None) -> Counter[tuple[int, int]] | None:
    """How many packed sequences there are of each number of queries and keys; None where data decides.

    >>> starts = Spec.of((4,), (1,), torch.int32, "cuda:0", values=(0, 3, 10, 13))
    >>> packed_lengths(starts, starts)
    Counter({(3, 3): 2, (7, 7): 1})
    """
    queries, keys = cumulative_q.values, None if cumulative_k is None else cumulative_k.values
    if queries is None or keys is None:
        return None
    return Counter(zip((b - a for a, b in pairwise(queries)), (b - a for a, b in pairwise(keys))))


def raw_flops(query: Spec, key: Spec, value: Spec, cumulative_q: Spec | None, cumulative_k: Spec | None, window: Window,
              count: Callable[..., FlopCount]) -> FlopCount | None:
    """Raw kernels: [batch, sequence, heads, dim]; or, with cumulative lengths, sequences packed into one:
    [total, heads, dim] (flash) or [1, total, heads, dim] (memory-efficient), each of which attends to itself alone.
    """
    if cumulative_q is None:
        return count(Attention.heads_inside(query, key, value), query, window)
    lengths = packed_lengths(cumulative_q, cumulative_k)
    return None if lengths is None else sum(
        (count(Attention(query[-2], queries, keys, query[-1], value[-1]), query, window).times(number)
         for (queries, keys), number in lengths.items()), FlopCount(0))


def flash_window(is_causal: bool, left: int | None, right: int | None) -> Window:
    """FlashAttention aligns masks to the bottom right (its README, 2.1); a negative window has no limit."""
    left = None if left is None or left < 0 else left
    right = 0 if is_causal else None if right is None or right < 0 else right
    return Window(left, right, bottom_right=True)


def raw_flash_flops(query: Spec, key: Spec, value: Spec, cum_seq_q: Spec | None, cum_seq_k: Spec | None, max_q: int,
                    max_k: int, dropout_p: float, is_causal: bool, *_: Any, window_size_left: int | None = None,
                    window_size_right: int | None = None, count: Callable[..., FlopCount] = Attention.forward,
                    out: Any = None, **__: Any) -> FlopCount | None:
    """FLOPs of ``_flash_attention_forward``, or of its backward pass with ``count=Attention.backward``."""
    window = flash_window(is_causal, window_size_left, window_size_right)
    return raw_flops(query, key, value, cum_seq_q, cum_seq_k, window, count)


def varlen_flops(query: Spec, key: Spec, value: Spec, cu_seq_q: Spec, cu_seq_k: Spec | None, max_q: int, max_k: int,
                 is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
                 enable_gqa: bool = False, seqused_k: Spec | None = None, *_: Any,
                 count: Callable[..., FlopCount] = Attention.forward, out: Any = None, **__: Any) -> FlopCount | None:
    """torch.nn.attention.varlen, the same kernel; how many keys of a cache are used is data."""
    if seqused_k is not None:
        return None
    window = flash_window(is_causal, *(window_size or (-1, -1)))
    return raw_flops(query, key, value, cu_seq_q, cu_seq_k, window, count)


def efficient_window(custom_mask_type: int, window_size: int | None) -> Window:
    """`custom_mask_type` of sdp_utils.h: 0 none, 1 causal from the top left, 2 causal from the bottom right.

    A window of n lets a query see its own key and the n - 1 before it.
    """
    left = None if not window_size or window_size < 0 else window_size - 1
    return Window(left, 0 if custom_mask_type else None, bottom_right=custom_mask_type == 2)


def cudnn_flops(query: Spec, key: Spec, value: Spec, cumulative_q: Spec | None, cumulative_k: Spec | None,
                is_causal: bool, count: Callable[..., FlopCount]) -> FlopCount | None:
    """Raw cuDNN kernels: [batch, heads, sequence, dim], or packed as flash; of the dense, some are given no lengths."""
    if len(query) == 3:
        return raw_flops(query, key, value, cumulative_q, cumulative_k, masked(is_causal), count)
    return count(Attention.of(query, key, value), query, masked(is_causal))


def multi_head_attention_flops(query: Spec, key: Spec, value: Spec, embed_dim: int, num_head: int, qkv_weight: Spec, *_:
                               Any, out: Any = None, **__: Any) -> FlopCount:
    """Projections of q, k, v and of the output ([.., embed] by [embed, embed]) and the attention between them.

    As everywhere for fused attention: matrix products only, biases and softmax add nothing.
    """
    batch = prod(query[:-2])
    queries, keys = query[-2], key[-2]
    projections = 2 * query.numel + key.numel + value.numel  # rows times embed_dim, each met by embed_dim columns
    attention = Attention(batch * num_head, queries, keys, embed_dim // num_head, embed_dim // num_head)
    return multiply_adds(projections * embed_dim, query) + attention.forward(query)


def encoder_layer_flops(src: Spec, embed_dim: int, num_heads: int, qkv_weight: Spec, qkv_bias: Spec, proj_weight: Spec,
                        proj_bias: Spec, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Spec,
                        norm_bias_1: Spec, norm_weight_2: Spec, norm_bias_2: Spec, ffn_weight_1: Spec, *_: Any,
                        out: Any = None, **__: Any) -> FlopCount:
    """Multi-head attention, two linear layers, their activation, two residual sums and two layer norms."""
    hidden = src.numel // embed_dim * ffn_weight_1[0]
    feed_forward = multiply_adds(2 * hidden * embed_dim, src)
    elementwise = hidden * (GELU_FLOPS if use_gelu else 1) + src.numel * (2 + 2 * LAYER_NORM_FLOPS)
    return multi_head_attention_flops(src, src, src, embed_dim, num_heads,
                                      qkv_weight) + feed_forward + FlopCount(elementwise)


register_each(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _triton_scaled_dot_attention",
    forward_of(causal_at=4))
register_flop_impl("aten::_scaled_dot_product_flash_attention.quantized", forward_of(causal_at=7))
register_each("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", forward_of(causal_at=6))
register_each(
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_attention_math_for_mps", forward_of(causal_at=5))
register_each("_scaled_dot_product_flash_attention_backward", backward_of(causal_at=11))
register_each("_scaled_dot_product_flash_attention_for_cpu_backward", backward_of(causal_at=7))
register_each("_scaled_dot_product_efficient_attention_backward", backward_of(causal_at=11))
register_each("_scaled_dot_product_fused_attention_overrideable_backward", backward_of(causal_at=13))
register_each("_cudnn_attention_forward",
    lambda query, key, value, bias, cu_q, cu_k, max_q, max_k, _logsumexp, _dropout_p=0.0, is_causal=False, *_, **__: (
        cudnn_flops(query, key, value, cu_q, cu_k, is_causal, Attention.forward)))
register_each("_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward",
    lambda grad_out, query, key, value, _out, _logsumexp, _seed, _offset, bias, cu_q, cu_k, max_q, max_k, _dropout_p,
    is_causal, *_, **__: (
        cudnn_flops(query, key, value, cu_q, cu_k, is_causal, Attention.backward)))
register_each("_flash_attention_forward", raw_flash_flops)
register_each("_flash_attention_forward_no_dropout_inplace",
              lambda _out, *args, **kwargs: raw_flash_flops(*args, **kwargs))
register_each("_flash_attention_backward", lambda grad_out, query, key, value, _out, _logsumexp, *rest, **options: (
    raw_flash_flops(query, key, value, *rest, count=Attention.backward, **options)))
register_each("_efficient_attention_forward",
    lambda query, key, value, bias, cu_q, cu_k, max_q, max_k, _dropout_p, mask_type, *_, window_size=None, **__: (
        raw_flops(query, key, value, cu_q, cu_k, efficient_window(mask_type, window_size), Attention.forward)))
register_each("_efficient_attention_backward",
    lambda grad_out, query, key, value, bias, _out, cu_q, cu_k, max_q, max_k, _logsumexp, _p, _seed, _offset, mask_type,
    *_, window_size=None, **__: (
        raw_flops(query, key, value, cu_q, cu_k, efficient_window(mask_type, window_size), Attention.backward)))
register_flop_impl("torch_attn::_varlen_attn", varlen_flops)
register_flop_impl("torch_attn::_varlen_attn_out", lambda _out, *args, **options: varlen_flops(*args, **options))
register_flop_impl("torch_attn::_varlen_attn_backward",
    lambda grad_out, query, key, value, _out, _logsumexp, cu_q, cu_k, max_q, max_k, is_causal=False, _state=None,
    scale=None, window_size=None, **_: (
        varlen_flops(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size,
                     count=Attention.backward)))
# flash_attn/flash_attn_interface.py
register_flop_impl("flash_attn::_flash_attn_varlen_forward",
    lambda query, key, value, cu_q, cu_k, max_q, max_k, _dropout_p, scale, is_causal, left=-1, right=-1, *_, **__: (
        varlen_flops(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, [left, right])))
register_flop_impl("flash_attn::_flash_attn_varlen_backward",
    lambda grad_out, query, key, value, _out, _logsumexp, _dq, _dk, _dv, cu_q, cu_k, max_q, max_k, _dropout_p, scale,
    is_causal, left=-1, right=-1, *_, **__: (
        varlen_flops(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, [left, right],
                     count=Attention.backward)))
# flex_attention, dense: its block mask is data
register_flop_impl(torch.ops.higher_order.flex_attention,
    lambda query, key, value, *_, **__: Attention.of(query, key, value).forward(query))
register_flop_impl(torch.ops.higher_order.flex_attention_backward,
    lambda query, key, value, *_, **__: Attention.of(query, key, value).backward(query))
register_each("_native_multi_head_attention _triton_multi_head_attention", multi_head_attention_flops)
# the fast path of torch.nn.TransformerEncoder
register_each("_transformer_encoder_layer_fwd", encoder_layer_flops)
# A bias added to each of q, k, v, and q divided by the root of the head dimension
register_each("_transform_bias_rescale_qkv", lambda qkv, *_, **__: FlopCount(qkv.numel + qkv.numel // 3))


# Recurrent layers. Each weight matrix meets each row of the sequence once: matrix elements × rows multiply-adds.
#
# The cell's own arithmetic is counted per hidden element and step: biases add nothing in the fused layers, as in a
# matrix
# product; in the fused cells they are sums like any other.

LSTM, GRU = 2, 3  # of GATES' modes
CELL_FLOPS = {
    0: 2, 1: 2,  # sum of the two products, activation
    2: 13,       # four such sums and activations; f c + i g (3); o tanh c (2)
    3: 11,       # r and z (2 each); r × hidden, +, tanh (3); (1 - z) n + z h (4)
}
CELL_BACKWARD_FLOPS = {
    0: 1, 1: 3,  # g where positive; g (1 - h·h)
    2: 22,       # dc (5), do, di, df, dg and dc of the step before (5), three sigmoids and a tanh (12)
    3: 16,       # dn, dz (4), dh of the step before (1), tanh (3), dr and its hidden (2), two sigmoids (6)
}


def layer_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec, products: int = 1,
                cell_flops: Mapping[int, int] = CELL_FLOPS) -> FlopCount:
    """All layers and directions, given their weights: matrices [gates · hidden, inputs] and biases. Each row meets each
    matrix in so many ``products``.
    """
    matrices = [w for w in weights if len(w) == 2]
    recurrent = sum(w[0] == GATES[mode] * hidden_size for w in matrices) // 2  # layers × directions (projections aside)
    return multiply_adds(products * rows * sum(w.numel for w in matrices), like) + FlopCount(
        cell_flops[mode] * rows * hidden_size * recurrent)


def layer_backward_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec,
                         of_weights: bool = True) -> FlopCount:
    """The gradient of the data always runs; that of the weights is as many multiply-adds again."""
    return layer_flops(rows, weights, mode, hidden_size, like, 1 + of_weights, CELL_BACKWARD_FLOPS)


def fused_cell(mode: int) -> Formula:
    """The formula of a cell whose gates arrive multiplied: its arithmetic, and for each bias a sum a gate.

    >>> import torch
    >>> gates, c, b = (Spec.of(s, (1,) * len(s), torch.float32, "cpu") for s in ((2, 12), (2, 3), (12,)))
    >>> fused_cell(LSTM)(gates, gates, c), fused_cell(LSTM)(gates, gates, c, b, b)
    (78, 126)
    """
    return lambda _input_gates, _hidden_gates, state, input_bias=None, hidden_bias=None, *_, **__: (
        state.numel * (CELL_FLOPS[mode] + GATES[mode] * ((input_bias is not None) + (hidden_bias is not None))))


# x [time, batch, features] (or batch first), or packed [rows, features]
register_each("_cudnn_rnn", lambda x, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
# The last argument says which gradients are wanted, weights the last of them
register_each("_cudnn_rnn_backward miopen_rnn_backward",
    lambda x, weight, weight_stride0, weight_buf, hx, cx, y, grad_y, grad_hy, grad_cy, mode, hidden_size, *rest, **_: (
        layer_backward_flops(prod(x[:-1]), weight, mode, hidden_size, x, bool(rest[-1][3]))))
register_each("miopen_rnn", lambda x, weight, weight_stride0, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
# One layer in one direction
register_each("mkldnn_rnn_layer",
    lambda x, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, lengths, mode, hidden_size, *_, **__: (
        layer_flops(prod(x[:-1]), [w_ih, w_hh], mode, hidden_size, x)))
register_each("mkldnn_rnn_layer_backward",
    lambda x, w_ih, w_hh, b_ih, b_hh, hx, cx, y, hy, cy, grad_y, grad_hy, grad_cy, reverse, mode, size, *_, **__: (
        layer_backward_flops(prod(x[:-1]), [w_ih, w_hh], mode, size, x)))
register_each("_lstm_mps", lambda x, hx, params, *_, **__: layer_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x))
register_each("lstm_mps_backward",
    lambda grad_y, grad_hy, grad_cy, z_state, cell_state, x, outputs, hx, params, *_, **__: (
        layer_backward_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x)))
register_each("_thnn_fused_lstm_cell", fused_cell(LSTM))
register_each("_thnn_fused_gru_cell", fused_cell(GRU))
# The bias gradient sums the gates' over the batch: 4 to a hidden element, where there is one
register_each("_thnn_fused_lstm_cell_backward_impl _thnn_fused_lstm_cell_backward",
    lambda grad_hy, grad_cy, cx, *rest, **__: cx.numel * (CELL_BACKWARD_FLOPS[LSTM] + 4 * bool(rest and rest[-1])))
# The two bias gradients sum three gates each
register_each("_thnn_fused_gru_cell_backward",
    lambda grad_hy, workspace, has_bias, *_, **__: grad_hy.numel * (CELL_BACKWARD_FLOPS[GRU] + 6 * bool(has_bias)))
