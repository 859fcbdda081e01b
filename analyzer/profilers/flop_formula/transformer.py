"""Fused multi-head attention and encoder layers (the fast path of torch.nn.TransformerEncoder)."""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .attention import Attention
from .normalization import LAYER_NORM_FLOPS
from .pointwise import GELU_FLOPS
from .registration import FlopCount, register_each
from .size import multiply_adds


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


register_each("_native_multi_head_attention _triton_multi_head_attention", multi_head_attention_flops)
register_each("_transformer_encoder_layer_fwd", encoder_layer_flops)
# A bias added to each of q, k, v, and q divided by the root of the head dimension
register_each("_transform_bias_rescale_qkv", lambda qkv, *_, **__: FlopCount(qkv.numel + qkv.numel // 3))
