"""What attention kernels hold while they run: PyTorch's own, and of cuDNN's what its open frontend asks for."""
from __future__ import annotations

from math import ceil

import torch

from analyzer.meta.memory_need import Stage, kernel_stages
from analyzer.meta.signature import Signature

_aten = torch.ops.aten
_FLOAT_BYTES = 4
_BLOCK = 64  # rows and columns that one block of the float32 kernel handles


@kernel_stages(_aten._scaled_dot_product_efficient_attention_backward)
def efficient_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``_efficient_attention_backward`` in ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, for
    float32. First (grad · out) summed over each head, then what the splits of the keys add their gradient of the query
    into: GradQTempStorage of ``mem_eff_attention/kernel_backward.h``, 16 bytes and a block of floats each. On an H200
    it took 6,297,600 bytes for queries of (4, 12, 512, 64). The kernels for halves are not covered: PyTorch prefers
    others there.
    """
    grad_out, query, key = signature.inputs[:3]
    if query.dtype is not torch.float32:
        return ()
    batch, heads, length, size = query
    delta_bytes = batch * heads * length * _FLOAT_BYTES
    blocks = ceil(length / _BLOCK) * ceil(size / _BLOCK) if key[2] > _BLOCK else 0
    return Stage((grad_out.nbytes, delta_bytes)), Stage(
        (delta_bytes, batch * heads * blocks * (16 + _BLOCK * _BLOCK * _FLOAT_BYTES)))


@kernel_stages(_aten._scaled_dot_product_cudnn_attention_backward)
def cudnn_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``run_cudnn_SDP_bprop`` in ``aten/src/ATen/native/cudnn/MHA.cpp``: a copy of a gradient whose rows have gaps,
    then one workspace. In it, by ``get_fe_workspace_size_node`` of CompositeSDPABackwardNode (cudnn-frontend,
    node/scaled_dot_product_flash_attention.h, cuDNN 9): the query's gradient and the row sums in float32. The forward
    pass asks for none. What cuDNN's engine adds, as for the full heads of grouped queries, is not known.
    """
    grad_out, query = signature.inputs[:2]
    if not query.numel:
        return ()
    workspace = query.numel * _FLOAT_BYTES + query.numel // query[-1] * _FLOAT_BYTES
    return (Stage((workspace,) if grad_out.stride[-1] == 1 else (grad_out.nbytes, workspace)),)


@kernel_stages(_aten._scaled_dot_product_flash_attention_backward)
def flash_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``mha_bwd`` in ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``: row sums and the query's
    gradient in float32; with grouped queries, the gradients of keys and values per query head.
    """
    _, query, key = signature.inputs[:3]
    batch, heads, length, size = query
    rounded_length = ceil(length / 128) * 128
    rounded_size = ceil(size / 32) * 32 if size <= 192 else 256
    blocks = [batch * heads * rounded_length * _FLOAT_BYTES,
              batch * rounded_length * heads * rounded_size * _FLOAT_BYTES]
    if key[1] != heads:
        blocks += 2 * [batch * key[2] * heads * size * query.dtype.itemsize]
    return (Stage(tuple(blocks)),)
