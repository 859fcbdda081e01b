"""The time of attention operators: which kernel each runs, and where in its arguments sizes, masks and dropout stand.

What scaled_dot_product_attention runs on the simulated device is chosen where it is called (`analyzer.cuda`), and so is
the fast path of ``nn.TransformerEncoder``: the operators recorded are those that run. A mask given as a tensor hides
nothing, since kernels compute under it. Of packed sequences whose lengths are not known each is taken to be as long as
the longest, and as many as their tokens fill.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec
from analyzer.profilers.flop_formula.attention import packed_lengths

from .call import register_time_impl

_FLASH, _EFFICIENT, _CUDNN = "flash", "efficient", "cudnn"
#: Operators of [batch, heads, sequence, head] tensors; causality is aligned to the top left.
HEADS_FIRST = {
    "_scaled_dot_product_flash_attention": _FLASH, "_scaled_dot_product_efficient_attention": _EFFICIENT,
    "_scaled_dot_product_cudnn_attention": _CUDNN, "_scaled_dot_product_fused_attention_overrideable": _FLASH,
    "_cudnn_attention_forward": _CUDNN, "_cudnn_attention_backward": _CUDNN}
#: Operators of [batch, sequence, heads, head] tensors, or of packed [tokens, heads, head].
HEADS_INSIDE = {
    "_flash_attention_forward": _FLASH, "_flash_attention_forward_no_dropout_inplace": _FLASH,
    "_flash_attention_backward": _FLASH, "_efficient_attention_forward": _EFFICIENT,
    "_efficient_attention_backward": _EFFICIENT}
_BIASES = ("attn_bias", "bias")
_PACKED = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q"), ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")


def _is_dropping(named: Mapping[str, Any]) -> bool:
    return bool(named.get("dropout_p"))


def _is_masked(named: Mapping[str, Any]) -> bool:
    return any(isinstance(named.get(name), Spec) and named[name].numel for name in _BIASES)


def heads_first_time(kernel: str, backward: bool, signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The time of an operator whose tensors have their heads before their sequence."""
    named = signature.named_arguments()
    query, key, value = named["query"], named["key"], named["value"]
    if len(query) == 3:  # cuDNN's packed sequences
        return heads_inside_time(kernel, backward, signature, device)
    causal = bool(named.get("is_causal"))
    q_len, kv_len = query[-2], key[-2]
    if causal:
        kv_len = min(kv_len, q_len)  # what is further right is masked for all
    return attention_time(
        kernel, query.numel // max(1, query[-3] * q_len * query[-1]), query[-3], key[-3], q_len, kv_len, query[-1],
        value[-1], str(query.dtype), device, causal=causal, backward=backward, dropout=_is_dropping(named),
        masked=_is_masked(named))


def _find_longest(named: Mapping[str, Any], *names: str) -> int | None:
    return next((int(named[name]) for name in names if named.get(name) is not None), None)


def heads_inside_time(kernel: str, backward: bool, signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The time of an operator whose tensors have their heads after their sequence, or of packed sequences."""
    named = signature.named_arguments()
    query, key, value = named["query"], named["key"], named["value"]
    batch, q_len, kv_len = query[0], query[-3], key[-3]
    if any(named.get(name) is not None for name in _PACKED[0]):
        tokens, cached = q_len, kv_len
        starts: list[Any] = [next((named[n] for n in names if named.get(n) is not None), None) for names in _PACKED]
        lengths = packed_lengths(*starts)
        if lengths is None:
            q_len = _find_longest(named, "max_q", "max_seqlen_q") or tokens
            kv_len = _find_longest(named, "max_k", "max_seqlen_k") or kv_len
            batch = max(1, round(tokens / max(1, q_len)))
        else:  # as many alike that have as many tokens and as many pairs of them
            pairs = max(1, sum(number * queries * keys for (queries, keys), number in lengths.items()))
            batch = max(1, round(tokens * cached / pairs))
            q_len, kv_len = max(1, round(tokens / batch)), max(1, round(cached / batch))
    elif named.get("block_table") is not None or named.get("seqused_k") is not None:
        kv_len = _find_longest(named, "max_k") or kv_len
    causal = bool(named.get("is_causal") or named.get("custom_mask_type"))
    left, window = named.get("window_size_left"), named.get("window_size")
    if isinstance(window, (list, tuple)):
        left, causal = window[0], causal or window[1] == 0
    elif left is None:
        left = (window or 0) - 1  # counts the query's own key
    return attention_time(
        kernel, batch, query[-2], key[-2], q_len, kv_len, query[-1], value[-1], str(query.dtype), device,
        causal=causal, window=max(0, left), backward=backward, dropout=_is_dropping(named), masked=_is_masked(named))


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


register_time_impl("analyzer::cached_attention", cached_attention_time)
register_time_impl("analyzer::latent_attention", latent_attention_time)
for _name, _kernel in HEADS_FIRST.items():
    register_time_impl(f"aten::{_name}", functools.partial(heads_first_time, _kernel, _name.endswith("_backward")))
    if _name.startswith("_scaled"):
        register_time_impl(f"aten::{_name}_backward", functools.partial(heads_first_time, _kernel, True))
for _name in ("", "_out", "_backward"):  # torch.nn.attention.varlen
    register_time_impl(f"torch_attn::_varlen_attn{_name}", functools.partial(
        heads_inside_time, _FLASH, _name == "_backward"))
for _name, _kernel in HEADS_INSIDE.items():
    register_time_impl(f"aten::{_name}", functools.partial(heads_inside_time, _kernel, _name.endswith("_backward")))
