"""The fused inference path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` on CUDA, as the operators it
is made of. Sources: ``native_multi_head_attention_cuda`` in ``aten/src/ATen/native/transformers/cuda/attention.cu`` and
``aten/src/ATen/native/transformers/{attention,transformer}.cpp``. Neither has a gradient; nested tensors are not
covered.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, device_shape
from analyzer.cuda.sdp_choice import MATH, AttentionCall, choose_backend
from analyzer.meta.state import active_state

Tensor = torch.Tensor
aten = torch.ops.aten


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
