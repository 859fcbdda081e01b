"""Scaled dot product attention on the simulated device: the kernel that would run, with the same preparation of its
arguments. Source: ``scaled_dot_product_attention`` and its helpers in
``aten/src/ATen/native/transformers/attention.cpp``.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, device_shape, new_on_device_of
from analyzer.cuda.sdp_choice import CUDNN, EFFICIENT, FLASH, MATH, AttentionCall, choose_backend, choose_host_backend
from analyzer.errors import InputError
from analyzer.meta.intercept.gated_kernel import any_on
from analyzer.meta.state import active_state

Tensor = torch.Tensor
aten = torch.ops.aten
_FLASH_ALIGNMENT = 8       # pad_last_dim<8>: head sizes of the flash kernel
_EFFICIENT_ALIGNMENT = 8   # preprocess_mask, mem_eff_alignment


@device_kernel("scaled_dot_product_attention", on_any_device=True)
def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Any:
    """``scaled_dot_product_attention`` as a GPU or the CPU runs it."""
    if not _is_valid(query, key, value, attn_mask, is_causal):
        return NotImplemented  # torch says what is wrong
    # torch divides by their number, which ends the process
    if enable_gqa and 0 in (*key.shape[-3:-2], *value.shape[-3:-2]):
        raise InputError(
            f"scaled_dot_product_attention(enable_gqa=True): a key of shape {tuple(key.shape)} and a value of shape "
            f"{tuple(value.shape)} need at least one head each")
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    state = active_state()
    if not any_on(state, "cuda", call[:3]):
        if choose_host_backend(call) != FLASH:
            return NotImplemented  # torch's own way to the plain products
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=_to_additive(attn_mask, query.dtype), scale=scale)[0]
    backend = choose_backend(call)
    if backend == CUDNN:
        mask = _to_additive(attn_mask, query.dtype, -65504.0)  # the least half: convert_boolean_attn_mask_cudnn
        return aten._scaled_dot_product_cudnn_attention.default(query, key, value, mask, call.needs_grad, dropout_p,
                                                                is_causal, False, scale=scale)[0]
    if backend == FLASH:
        size = query.shape[-1]
        padded = [_pad_last(t, -size % _FLASH_ALIGNMENT) for t in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=_scale(
            query, scale))[0]
        return out if out.shape[-1] == size else aten.slice.Tensor(out, -1, 0, size)
    mask = _to_additive(attn_mask, query.dtype)
    if backend == EFFICIENT:
        if mask is not None:
            mask = _align(mask).expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention.default(query, key, value, mask, call.needs_grad, dropout_p,
                                                                    is_causal, scale=scale)[0]
    if backend == MATH:
        return aten._scaled_dot_product_attention_math.default(query, key, value, mask, dropout_p, is_causal, None,
                                                               scale=scale, enable_gqa=enable_gqa)[0]
    raise RuntimeError(f"No available kernel. Aborting execution. scaled_dot_product_attention({call.describe()}): "
                       "every backend that could run it is switched off; see torch.nn.attention.sdpa_kernel and "
                       "torch.backends.cuda.enable_math_sdp")


# validate_sdpa_input
def _is_valid(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if not query.dtype == key.dtype == value.dtype or min(query.dim(), key.dim(), value.dim()) < 2:
        return False
    return mask is None or not is_causal and mask.dtype in (torch.bool, torch.float32, query.dtype)


def _scale(query: Tensor, scale: float | None) -> float:  # calculate_scale
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


# convert_boolean_attn_mask
def _to_additive(mask: Tensor | None, dtype: torch.dtype, masked: float = -math.inf) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = new_on_device_of(mask, aten.scalar_tensor.default, 0.0, dtype=dtype)
    return aten.where.ScalarOther(mask, zero, masked)  # type: ignore[no-any-return]


def _pad_last(x: Tensor, count: int) -> Tensor:
    return aten.constant_pad_nd.default(x, [0, count]) if count else x


def _align(mask: Tensor) -> Tensor:  # preprocess_mask, pad_bias
    if mask.stride(-1) == 1 and all(s % _EFFICIENT_ALIGNMENT == 0 for s in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    # a whole multiple gets one more, as there
    padded = _pad_last(mask, _EFFICIENT_ALIGNMENT - length % _EFFICIENT_ALIGNMENT)
    return aten.slice.Tensor(padded, -1, 0, length)  # type: ignore[no-any-return]


@device_kernel("_scaled_dot_product_attention_math", on_any_device=True)
def attend_with_products(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                         dropout_p: float = 0.0, is_causal: bool = False, dropout_mask: Tensor | None = None, *,
                         scale: float | None = None, enable_gqa: bool = False) -> Any:
    """The plain products. On meta torch adds the mask out of place, on CUDA in place; without one both do the same."""
    if attn_mask is None and not is_causal or dropout_mask is not None:
        return NotImplemented
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16) and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = (aten.to.dtype(t, torch.float32) for t in (query, key, value))
    factor = math.sqrt(abs(_scale(query, scale)))
    scaled = aten.mul.Scalar(query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        attn_mask = _to_additive(aten.tril.default(new_on_device_of(
            query, aten.ones.default, [query.shape[-2], key.shape[-2]], dtype=torch.bool)), query.dtype)
    # names of their own, so that what the C++ function holds to its end is held here
    keys, values = (_repeat_heads(t, query) if enable_gqa else t for t in (key, value))
    weights = aten.matmul.default(scaled, aten.mul.Scalar(aten.transpose.int(keys, -2, -1), factor))
    weights = aten._safe_softmax.default(aten.add_.Tensor(weights, attn_mask), -1)
    if dropout_p > 0:
        weights = aten.dropout.default(weights, dropout_p, True)
    cast = aten.to.dtype(weights, dtype)  # first: compilers make the arguments of C++'s make_tuple from the last on
    return aten.to.dtype(aten.matmul.default(weights, values), dtype), cast


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:  # pre_process_group_query_attention_input
    if x.shape[-3] == query.shape[-3]:
        return x
    return aten.repeat_interleave.self_int(x, query.shape[-3] // x.shape[-3], -3)  # type: ignore[no-any-return]


@device_shape("_scaled_dot_product_cudnn_attention")
def cudnn_attention_shape(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
                          *args: Any, **kwargs: Any) -> Any:
    """run_cudnn_SDP_fprop makes the log-sum-exp only where a backward pass needs it; the meta kernel always does."""
    outputs = aten._scaled_dot_product_cudnn_attention.default(query, key, value, attn_bias, compute_log_sumexp, *args,
                                                               **kwargs)
    return outputs if compute_log_sumexp else (outputs[0], None, *outputs[2:])
