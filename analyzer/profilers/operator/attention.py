"""Attention: FLOPs, and which kernel each operator runs on which sizes.

What scaled_dot_product_attention runs on the simulated device is chosen where it is called (`analyzer.cuda`), and so is
the fast path of ``nn.TransformerEncoder``: the operators recorded are those that run.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .normalization import LAYER_NORM_FLOPS
from .pointwise import GELU_FLOPS
from .registration import FlopCount, OfSignature, multiply_adds, register_each, register_flop_impl, register_time_impl

# Attention kernels: their matrix products, as torch.utils.flop_counter counts them (the softmax between adds nothing).
#
# Forward: scores = q·kᵀ and out = p·v. Backward: scores again (no kernel saves them), and the gradients of p, v, q and
# k. ``flops`` is dense; ``executed_flops`` counts the (query, key) pairs that a causal or sliding-window mask leaves,
# to the element: kernels skip whole tiles only, so they execute a little more. A mask given as a tensor hides nothing,
# since kernels compute under it.

@dataclass(frozen=True)
class Window:
    """Keys a query may see: from ``left`` before its own position to ``right`` after it (None: no limit). Query i
    stands at key position i, or i + keys - queries where ``bottom_right``.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False


DENSE = Window()


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

    >>> visible_pairs(4, 4, Window(right=0)), visible_pairs(4, 4, DENSE), visible_pairs(4, 4, Window(left=1, right=0))
    (10, 16, 7)
    >>> visible_pairs(2, 5, Window(right=0, bottom_right=True)), visible_pairs(2, 5, Window(right=0))
    (9, 3)
    """
    offset = keys - queries if window.bottom_right else 0
    ends = queries * keys if window.right is None else sum_of_clamped(offset + window.right + 1, queries, keys)
    starts = 0 if window.left is None else sum_of_clamped(offset - window.left, queries, keys)
    return ends - starts


@dataclass(frozen=True)
class AttentionWork:
    """batch × heads problems of ``queries`` by ``keys``; grouped-query heads are query heads."""

    batch_heads: int
    queries: int
    keys: int
    qk_dim: int
    v_dim: int

    @classmethod
    def of(cls, query: Spec, key: Spec, value: Spec) -> AttentionWork:
        """From [batch..., heads, sequence, dim]."""
        return cls(prod(query[:-2]), query[-2], key[-2], query[-1], value[-1])

    def forward(self, like: Spec, window: Window = DENSE) -> FlopCount:
        return self._products(self.qk_dim + self.v_dim, like, window)

    def backward(self, like: Spec, window: Window = DENSE) -> FlopCount:
        return self._products(3 * self.qk_dim + 2 * self.v_dim, like, window)

    def _products(self, macs_per_pair: int, like: Spec, window: Window) -> FlopCount:
        dense = multiply_adds(self.batch_heads * self.queries * self.keys * macs_per_pair, like)
        if window.left is None and window.right is None:
            return dense
        pairs = visible_pairs(self.queries, self.keys, window)
        return FlopCount(dense.flops, dense.macs, multiply_adds(self.batch_heads * pairs * macs_per_pair, like).flops)


# Operators by the kernel that they run, None where its time is not modelled. The first have tensors of [batch, heads,
# sequence, head] and masks aligned to the top left, but for FlashAttention's; the others [batch, sequence, heads,
# head], or packed sequences.
HEADS_FIRST = {
    "flash": "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
             "_scaled_dot_product_fused_attention_overrideable "
             "_scaled_dot_product_fused_attention_overrideable_backward",
    "efficient": "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward",
    "cudnn": "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
             "_cudnn_attention_forward _cudnn_attention_backward",
    None: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
          "_triton_scaled_dot_attention scaled_dot_product_attention _scaled_dot_product_attention_math "
          "_scaled_dot_product_attention_math_for_mps"}
HEADS_INSIDE = {
    "flash": "aten::_flash_attention_forward aten::_flash_attention_forward_no_dropout_inplace "
             "aten::_flash_attention_backward torch_attn::_varlen_attn torch_attn::_varlen_attn_out "
             "torch_attn::_varlen_attn_backward",
    "efficient": "aten::_efficient_attention_forward aten::_efficient_attention_backward",
    None: "flash_attn::_flash_attn_varlen_forward flash_attn::_flash_attn_varlen_backward"}
_STARTS = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q"), ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")


def _given(named: Mapping[str, Any], *names: str) -> Any:
    return next((named[name] for name in names if named.get(name) is not None), None)


def _find_tensors(named: Mapping[str, Any]) -> tuple[Spec, Spec, Spec]:
    """Queries, keys and values, which some operators call by their first letters."""
    query, key, value = (_given(named, name, name[0]) for name in ("query", "key", "value"))
    return query, key, value


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


def _count_method(signature: Signature) -> Callable[[AttentionWork, Spec, Window], FlopCount]:
    return AttentionWork.backward if signature.op._schema.name.endswith("_backward") else AttentionWork.forward


def _is_flash(signature: Signature) -> bool:
    """Whether a causal mask is aligned to the bottom right, as FlashAttention's is (its README, 2.1)."""
    name = signature.op._schema.name
    return "flash" in name and "cpu" not in name


def heads_first_flops(signature: Signature) -> FlopCount | None:
    named = signature.named_arguments()
    query, key, value = _find_tensors(named)
    window = Window(right=0, bottom_right=_is_flash(signature)) if named.get("is_causal") else DENSE
    if len(query) == 3:  # cuDNN's packed sequences
        return _heads_inside_flops(signature, named, query, key, value, window)
    return _count_method(signature)(AttentionWork.of(query, key, value), query, window)


def heads_inside_flops(signature: Signature) -> FlopCount | None:
    """FLOPs of an operator whose tensors have their heads after their sequence, or of packed sequences."""
    named, name = signature.named_arguments(), signature.op._schema.name
    if "varlen_attn" in name and named.get("seqused_k") is not None:
        return None  # how many keys of a cache are used is data
    if "efficient" in name:
        # `custom_mask_type` of sdp_utils.h: 0 none, 1 causal from the top left, 2 causal from the bottom right. A
        # window of n lets a query see its own key and the n - 1 before it.
        kind, size = named["custom_mask_type"], named.get("window_size")
        window = Window(size - 1 if size and size > 0 else None, 0 if kind else None, bottom_right=kind == 2)
    else:  # aligned as `_is_flash` says; a negative window has no limit
        left, right = named.get("window_size") or (named.get("window_size_left"), named.get("window_size_right"))
        is_causal = named.get("is_causal") or named.get("causal")
        window = Window(None if left is None or left < 0 else left,
                        0 if is_causal else None if right is None or right < 0 else right, bottom_right=True)
    return _heads_inside_flops(signature, named, *_find_tensors(named), window)


def _heads_inside_flops(signature: Signature, named: Mapping[str, Any], query: Spec, key: Spec, value: Spec,
                        window: Window) -> FlopCount | None:
    count, (starts_q, starts_k) = _count_method(signature), (_given(named, *names) for names in _STARTS)
    if starts_q is None:
        return count(AttentionWork(query[0] * query[2], query[1], key[1], query[3], value[3]), query, window)
    lengths = packed_lengths(starts_q, starts_k)  # each sequence attends to itself alone
    return None if lengths is None else sum(
        (count(AttentionWork(query[-2], queries, keys, query[-1], value[-1]), query, window).times(number)
         for (queries, keys), number in lengths.items()), FlopCount(0))


def heads_first_time(kernel: str, signature: Signature, device: DeviceSpec) -> KernelTime | None:
    named = signature.named_arguments()
    query, key, value = named["query"], named["key"], named["value"]
    if len(query) == 3:  # cuDNN's packed sequences
        return heads_inside_time(kernel, signature, device)
    causal, q_len, kv_len = bool(named.get("is_causal")), query[-2], key[-2]
    if causal and not _is_flash(signature):
        kv_len = min(kv_len, q_len)  # what is further right is masked for all
    return attention_time(
        kernel, query.numel // max(1, query[-3] * q_len * query[-1]), query[-3], key[-3], q_len, kv_len, query[-1],
        value[-1], str(query.dtype), device, causal=causal, **_read_options(signature, named))


def heads_inside_time(kernel: str, signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Where the lengths of packed sequences are unknown, each is as long as the longest, and as many as tokens fill."""
    named = signature.named_arguments()
    query, key, value = named["query"], named["key"], named["value"]
    batch, q_len, kv_len = query[0], query[-3], key[-3]
    starts_q, starts_k = (_given(named, *names) for names in _STARTS)
    if starts_q is not None:
        tokens, cached = q_len, kv_len
        lengths = packed_lengths(starts_q, starts_k)
        if lengths is None:
            q_len = int(_given(named, "max_q", "max_seqlen_q") or tokens)
            kv_len = int(_given(named, "max_k", "max_seqlen_k") or kv_len)
            batch = max(1, round(tokens / max(1, q_len)))
        else:  # as many alike that have as many tokens and as many pairs of them
            pairs = max(1, sum(number * queries * keys for (queries, keys), number in lengths.items()))
            batch = max(1, round(tokens * cached / pairs))
            q_len, kv_len = max(1, round(tokens / batch)), max(1, round(cached / batch))
    elif named.get("block_table") is not None or named.get("seqused_k") is not None:
        kv_len = int(_given(named, "max_k") or kv_len)
    causal = bool(named.get("is_causal") or named.get("custom_mask_type"))
    left, window = named.get("window_size_left"), named.get("window_size")
    if isinstance(window, (list, tuple)):
        left, causal = window[0], causal or window[1] == 0
    elif left is None:
        left = (window or 0) - 1  # counts the query's own key
    return attention_time(
        kernel, batch, query[-2], key[-2], q_len, kv_len, query[-1], value[-1], str(query.dtype), device,
        causal=causal, window=max(0, left), **_read_options(signature, named))


def _read_options(signature: Signature, named: Mapping[str, Any]) -> dict[str, bool]:
    masked = any(isinstance(mask := named.get(name), Spec) and mask.numel > 0 for name in ("attn_bias", "bias"))
    return {"backward": signature.op._schema.name.endswith("_backward"), "dropout": bool(named.get("dropout_p")),
            "masked": masked}


def cached_attention_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """New tokens' attention to a cache, by a serving library's kernel; what stores them is an operator of its own."""
    query, keys, values, window = signature.args[:4]
    return attention_time(
        "paged", query[0], query[2], keys[2], query[1], keys[1], query[3], values[3], str(query.dtype), device,
        causal=True, window=window if window < keys[1] else 0, kv_item_bytes=keys.dtype.itemsize, stores_keys=False)


def latent_attention_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The same with one head of latents that are keys and values at once, and so are read once."""
    query, latents, rotated, rank = signature.args[:4]
    return attention_time(
        "paged", query[0], query[2], 1, query[1], latents[1], latents[3], rotated[3], str(query.dtype), device,
        causal=True, kv_item_bytes=latents.dtype.itemsize, stores_keys=False)


for _table, _formula, _rule in ((HEADS_FIRST, heads_first_flops, heads_first_time),
                                (HEADS_INSIDE, heads_inside_flops, heads_inside_time)):
    for _kernel, _names in _table.items():
        for _name in _names.split():
            _key = _name if "::" in _name else f"aten::{_name}"
            register_flop_impl.add(_key, OfSignature(_formula))
            if _kernel is not None:
                register_time_impl.add(_key, partial(_rule, _kernel))
register_time_impl.add("analyzer::cached_attention", cached_attention_time)
register_time_impl.add("analyzer::latent_attention", latent_attention_time)


def multi_head_attention_flops(query: Spec, key: Spec, value: Spec, embed_dim: int, num_head: int, *_: Any,
                               out: Any = None, **__: Any) -> FlopCount:
    """Projections of q, k, v and of the output ([.., embed] by [embed, embed]) and the attention between them."""
    projections = 2 * query.numel + key.numel + value.numel  # rows times embed_dim, each met by embed_dim columns
    width = embed_dim // num_head
    attention = AttentionWork(prod(query[:-2]) * num_head, query[-2], key[-2], width, width)
    return multiply_adds(projections * embed_dim, query) + attention.forward(query)


def encoder_layer_flops(signature: Signature) -> FlopCount:
    """Multi-head attention, two linear layers, their activation, two residual sums and two layer norms."""
    named = signature.named_arguments()
    src, embed_dim = named["src"], named["embed_dim"]
    hidden = src.numel // embed_dim * named["ffn_weight_1"][0]
    elementwise = hidden * (GELU_FLOPS if named["use_gelu"] else 1) + src.numel * (2 + 2 * LAYER_NORM_FLOPS)
    return multi_head_attention_flops(src, src, src, embed_dim, named["num_heads"]) + multiply_adds(
        2 * hidden * embed_dim, src) + FlopCount(elementwise)


# flex_attention, dense: its block mask is data
register_flop_impl.add(torch.ops.higher_order.flex_attention,
    lambda query, key, value, *_, **__: AttentionWork.of(query, key, value).forward(query))
register_flop_impl.add(torch.ops.higher_order.flex_attention_backward,
    lambda query, key, value, *_, **__: AttentionWork.of(query, key, value).backward(query))


def compiled_flex_flops(signature: Signature) -> FlopCount | None:
    """Executed are the blocks that the mask does not hide whole."""
    named = signature.named_arguments()
    query, key, value = _find_tensors(named)
    size, visited = AttentionWork.of(query, key, value), named["visited"]
    dense = _count_method(signature)(size, query, DENSE)
    pairs = max(1, size.batch_heads * size.queries * size.keys)
    return dense if visited is None else FlopCount(dense.flops, dense.macs, dense.flops * visited // pairs)


def compiled_flex_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """That of PyTorch's fused kernels, of as many keys as a query meets in the mean: of a generated one nothing is
    known.
    """
    named = signature.named_arguments()
    query, key, value = _find_tensors(named)
    keys, visited = key[2], named["visited"]
    if visited is not None:
        keys = round(visited / max(1, query[0] * query[1] * query[2]))
    return attention_time(
        "efficient" if query.dtype.itemsize == 4 else "flash", query[0], query[1], key[1], query[2], keys, query[3],
        value[3], str(query.dtype), device, causal=False, **_read_options(signature, named))


for _key in ("analyzer::flex_attention", "analyzer::flex_attention_backward"):
    register_flop_impl.add(_key, OfSignature(compiled_flex_flops))
    register_time_impl.add(_key, compiled_flex_time)
register_each("_native_multi_head_attention _triton_multi_head_attention", multi_head_attention_flops)
# the fast path of torch.nn.TransformerEncoder
register_each("_transformer_encoder_layer_fwd", OfSignature(encoder_layer_flops))
# A bias added to each of q, k, v, and q divided by the root of the head dimension
register_each("_transform_bias_rescale_qkv", lambda qkv, *_, **__: FlopCount(qkv.numel + qkv.numel // 3))
