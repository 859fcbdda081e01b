"""Attention on the simulated device: scaled dot products, flex attention, the encoder's fused path."""
from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey

from analyzer.cuda import kernel_registry
from analyzer.cuda.kernel_registry import device_kernel, device_shape, kernel_replacements, new_on_device_of
from analyzer.cuda.sdp_choice import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionCall,
    can_use,
    choose_backend,
    choose_host_backend,
)
from analyzer.errors import InputError
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.simulated_device import any_on
from analyzer.meta.state import active_state, current

from .flex_attention import attend_compiled, attend_compiled_backward, list_captured, sum_of_gradients

# Scaled dot product attention: the kernel that would run, with the same preparation of its arguments. Source:
# ``scaled_dot_product_attention`` and its helpers in ``aten/src/ATen/native/transformers/attention.cpp``.

Tensor = torch.Tensor
aten = torch.ops.aten
_ALIGNMENT = 8  # pad_last_dim<8>: head sizes of the flash kernel; preprocess_mask, mem_eff_alignment


@device_kernel("scaled_dot_product_attention", on_any_device=True)
def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Any:
    is_valid = query.dtype == key.dtype == value.dtype and min(query.dim(), key.dim(), value.dim()) >= 2 and (
        attn_mask is None or not is_causal and attn_mask.dtype in (torch.bool, torch.float32, query.dtype))
    if not is_valid:  # validate_sdpa_input
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
        padded = [_pad_last(t, -size % _ALIGNMENT) for t in (query, key, value)]
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
    if mask.stride(-1) == 1 and all(s % _ALIGNMENT == 0 for s in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    padded = _pad_last(mask, _ALIGNMENT - length % _ALIGNMENT)  # a whole multiple gets one more, as there
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


# ``flex_attention`` where it is not compiled into one kernel: ``sdpa_dense``, ``sdpa_dense_backward`` and
# ``FlexAttentionAutogradOp`` in ``torch/_higher_order_ops/flex_attention.py``, but for the gradient of the score
# function, which torch traces with tensors of its own. Its package has the operator under this name.
flex: Any = importlib.import_module("torch._higher_order_ops.flex_attention")


@kernel_replacements.append
def answer_operator() -> Iterator[Undo]:
    operator = flex.flex_attention
    yield kernel_registry.set_entry(operator, operator.py_kernels, DispatchKey.Autograd, _attend_with_autograd)
    yield kernel_registry.set_below_autograd(operator, _attend)


def _attend_with_autograd(*args: Any) -> Any:
    if current() is None:  # another thread
        return flex.flex_attention_autograd(*args)
    *first, score_buffers, mask_buffers = args
    state = active_state()
    if state.graph is not None:
        score_buffers, mask_buffers = list_captured(first[3]), tuple(list_captured(first[4][-1]))
        return state.tracing.dispatch(FlexAttention.apply, (*first, mask_buffers, *score_buffers), {},
                                      lambda function, given, _: function(*given))
    return FlexAttention.apply(*first, mask_buffers, *score_buffers)


def _attend(*args: Any) -> Any:
    if active_state().graph is not None:
        return attend_compiled(args[0], args[1], args[2], args[4], (*args[7], *args[8]))
    active_state().assume(
        "flex_attention is profiled as it runs without torch.compile: it makes the whole matrix of scores")
    with without_modes():
        # torch asks it for the order of strides, and its import makes tensors
        import torch._inductor.ir  # noqa: F401
    return flex.sdpa_dense(*args)


class FlexAttention(torch.autograd.Function):
    """Saves what ``FlexAttentionAutogradOp`` saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple[Any, ...],
                scale: float, kernel_options: dict[str, Any], mask_buffers: tuple[Any, ...],
                *score_buffers: Any) -> Any:
        ctx.set_materialize_grads(False)
        settings = score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
        out, logsumexp, max_scores = _attend(query, key, value, *settings)
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(query, key, value, out, logsumexp, max_scores,
                              *(t for t in block_mask if isinstance(t, Tensor)),
                              *(t for t in (*score_buffers, *mask_buffers) if isinstance(t, Tensor)))
        ctx.settings = settings
        return out, logsumexp, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, logsumexp, *_ = ctx.saved_tensors
        score_mod, *settings = ctx.settings
        if active_state().graph is not None:
            block_mask, _, _, score_buffers, mask_buffers = settings
            found = attend_compiled_backward(query, key, value, out, logsumexp, grads[0], grads[1], block_mask,
                                             (*score_buffers, *mask_buffers))
            return *found, *[None] * 5, *[sum_of_gradients(buffer) if buffer.requires_grad else None
                                          for buffer in score_buffers]
        for_logsumexp = torch.zeros_like(logsumexp) if grads[1] is None else grads[1]  # torch 2.9 takes no None
        *found, for_buffers = flex.sdpa_dense_backward(query, key, value, out, logsumexp, grads[0], for_logsumexp,
                                                       score_mod, _gradient_of(score_mod), *settings)
        return *found, *[None] * 5, *for_buffers


def _gradient_of(score_mod: Any) -> Any:
    def joint(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, grad: Tensor, *buffers: Any) -> Any:
        pull_back = torch.func.vjp(lambda score, *buffers: score_mod(score, b, h, m, n, *buffers), score, *buffers)[1]
        for_score, *for_buffers = pull_back(grad)
        return [for_score, None, None, None, None, *for_buffers]
    return joint


# The fused inference path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` on CUDA, without nested
# tensors. Sources: ``native_multi_head_attention_cuda`` in ``aten/src/ATen/native/transformers/cuda/attention.cu`` and
# ``aten/src/ATen/native/transformers/{attention,transformer}.cpp``.

@device_kernel("_native_multi_head_attention")
def _attend_with_heads(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
                       qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
                       need_weights: bool = True, average_attn_weights: bool = True,
                       mask_type: int | None = None) -> Any:
    if query.is_nested or query.dim() != 3 or not query.numel():
        return NotImplemented
    if query is key is value and embed_dim // num_head % 8 == 0 and not need_weights and mask is None:
        q = _split_heads(query, num_head)
        if choose_backend(AttentionCall(q, q, q, None, 0.0, False, False)) not in (MATH, -1):
            parts = aten.chunk.default(aten.linear.default(query, qkv_weight, qkv_bias), 3, -1)
            y = aten.scaled_dot_product_attention.default(*(_split_heads(p, num_head) for p in parts))
            merged = y.transpose(1, 2).reshape(query.shape[0], -1, embed_dim)
            return aten.linear.default(merged, proj_weight, proj_bias), None
    batch, length = query.shape[:2]
    q, k, v = aten._transform_bias_rescale_qkv.default(_project(query, key, value, embed_dim, qkv_weight), qkv_bias,
                                                       num_head)
    flat = (batch * num_head, -1, embed_dim // num_head)
    weights = aten.bmm.default(q.view(flat), k.view(flat).transpose(1, 2)).view(batch, num_head, length, -1)
    if mask is None:
        weights = aten._softmax.out(weights, -1, False, out=weights)
    else:
        weights = aten._masked_softmax.default(weights, mask if mask.dtype is torch.bool else mask.to(torch.bool), 3,
                                               mask_type)
    context = aten.bmm.out(weights.view(batch * num_head, length, -1), v.view(flat), out=q.view(flat)).view(
        batch, num_head, length, -1)
    merged = context.permute(0, 2, 1, 3).contiguous().view(batch * length, embed_dim)
    out = aten.linear.default(merged, proj_weight, proj_bias).view(batch, length, -1)
    if not need_weights:
        return out, None
    return out, aten.div_.Scalar(aten.sum.dim_IntList(weights, [1]), num_head) if average_attn_weights else weights


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)


def _project(query: Tensor, key: Tensor, value: Tensor, size: int, weight: Tensor) -> Tensor:  # qkv_projection
    if query is key is value:
        return aten.matmul.default(query, weight.t())  # type: ignore[no-any-return]
    if key is value:
        q_weight, kv_weight = weight.split([size, 2 * size])
        return torch.cat([aten.matmul.default(query, q_weight.t()), aten.matmul.default(key, kv_weight.t())], 2)
    return torch.cat([aten.matmul.default(x, w.t()) for x, w in zip((query, key, value), weight.chunk(3))], 2)


@device_shape("_transform_bias_rescale_qkv")
def _transform_shape(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    batch, length, size = qkv.shape
    return tuple(qkv.new_empty(3, batch, num_heads, length, size // 3 // num_heads).unbind(0))


@device_kernel("_transformer_encoder_layer_fwd")
def _encode(src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
            proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
            norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
            ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None) -> Any:
    if src.is_nested or not src.numel():
        return NotImplemented
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.layer_norm.default(x, [embed_dim], weight, bias, eps, True)  # type: ignore[no-any-return]
    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = aten._native_multi_head_attention.default(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight,
                                                  proj_bias, mask, False, True, mask_type)[0]
    x = aten.add_.Tensor(x, src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before_ffn = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    flat = x.view(-1, x.shape[-1])
    inner = aten._addmm_activation.default(ffn_bias_1, flat, ffn_weight_1.t(), beta=1, alpha=1, use_gelu=use_gelu)
    x = aten.addmm.default(ffn_bias_2, inner, ffn_weight_2.t()).view(*x.shape[:2], -1)
    x = aten.add_.Tensor(x, before_ffn)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


@device_kernel("_nested_tensor_from_mask_left_aligned", on_any_device=True)
def _is_left_aligned(t: Tensor, mask: Tensor) -> bool:
    active_state().assume("padding masks are taken not to be left-aligned, so that "
                          "TransformerEncoder makes no nested tensors of its input")
    return False


@kernel_replacements.append
def answer_which_kernel() -> Iterator[Undo]:
    """``torch.backends.cuda.can_use_flash_attention`` and its like, which torch/nn/attention/bias.py asks, too."""
    for backend, name in ((FLASH, "_can_use_flash_attention"), (EFFICIENT, "_can_use_mem_efficient_attention"),
                          (CUDNN, "_can_use_cudnn_attention")):
        yield answer(torch._C, name, partial(_can_use_kernel, backend))


def _can_use_kernel(backend: int, params: Any, debug: bool = False) -> bool:
    call = AttentionCall(params.query, params.key, params.value, params.attn_mask, params.dropout, params.is_causal,
                         params.enable_gqa)
    return any_on(active_state(), "cuda", call[:3]) and can_use(backend, call)
