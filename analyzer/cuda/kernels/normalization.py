"""Normalization on the simulated device and on the CPU."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import get_computation_dtype, suggest_memory_format

from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape, host_kernel
from analyzer.meta.state import active_state
from analyzer.meta.tensor import with_node

# CUDA: ``aten/src/ATen/native/Normalization.cpp`` (_select_batch_norm_backend, _batch_norm_impl_index),
# ``cudnn/BatchNorm.cpp`` and ``layer_norm.cpp`` (rms_norm_symint) there. An H200 under torch 2.11 ran
# ``cudnn_batch_norm`` for float32 and ``native_batch_norm`` for bfloat16, also with float32 weights (autocast).

Tensor = torch.Tensor
aten = torch.ops.aten
_LARGEST_BATCH = {True: 880801, False: 65535}  # in training, and else
_INT32_MAX = 2**31 - 1


@device_kernel("_batch_norm_impl_index")
def _normalize_batch(input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                     running_var: Tensor | None, training: bool, momentum: float, eps: float,
                     cudnn_enabled: bool) -> Any:
    if not input.numel() or not _uses_cudnn(input, weight, bias, running_mean, running_var, training):
        return NotImplemented  # native_batch_norm, on CUDA as on meta
    assert weight is not None and bias is not None
    layout = suggest_memory_format(input)
    if training and layout is not torch.contiguous_format:
        # CUDNN_BATCHNORM_SPATIAL_PERSISTENT, whose reserve cuDNN alone knows; in the other modes it is none (measured)
        active_state().assume(
            "cuDNN batch normalisation of channels-last tensors is assumed to keep no reserve for its backward pass")
    outputs = aten.cudnn_batch_norm.default(input.contiguous(memory_format=layout), weight.contiguous(),
                                            bias.contiguous(), _contiguous(running_mean), _contiguous(running_var),
                                            training, momentum, eps)
    return (*outputs, 1)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _uses_cudnn(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
                training: bool) -> bool:
    if weight is None or bias is None or (mean is None) != (var is None) or mean is None and not training:
        return False
    dtypes = input.dtype, weight.dtype
    if torch.bfloat16 in dtypes or dtypes[0] is torch.float16 and dtypes[1] is not torch.float32:
        return False
    fits = input.dim() >= 3 and input.shape[0] <= _LARGEST_BATCH[training] and input.numel() < _INT32_MAX
    return fits and bool(torch._C._get_cudnn_enabled())


@with_node("FusedRmsNormBackward0")
class FusedRmsNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm``, which on meta is a composition of eight operators."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: list[int], weight: Tensor | None,
                eps: float | None) -> Tensor:
        out, rstd = call_whole(aten._fused_rms_norm.default, input, normalized_shape, weight, eps)
        ctx.normalized_shape = normalized_shape
        ctx.save_for_backward(input, weight, rstd)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad_input, grad_weight = call_whole(aten._fused_rms_norm_backward.default, grads[0], input,
                                             ctx.normalized_shape, rstd, weight, needed)
        return grad_input, None, grad_weight, None


@device_kernel("rms_norm")
def _normalize_root_mean_square(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None,
                                eps: float | None = None) -> Any:
    fits = tuple(input.shape[input.dim() - len(normalized_shape):]) == tuple(normalized_shape)
    if (not hasattr(aten, "_fused_rms_norm") or not fits or input.is_complex() or weight is not None
            and weight.dtype != input.dtype or suggest_memory_format(input) is not torch.contiguous_format):
        return NotImplemented  # rms_norm_composite, or an error that torch words
    return FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)


@device_shape("_fused_rms_norm")
def _fused_rms_norm_shape(input: Tensor, normalized_shape: list[int], weight: Tensor | None,
                          eps: float | None) -> tuple[Tensor, Tensor]:
    outer = input.shape[:input.dim() - len(normalized_shape)]
    rstd = input.new_empty((*outer, *(1 for _ in normalized_shape)), dtype=get_computation_dtype(input.dtype))
    return torch.empty_like(input, memory_format=torch.contiguous_format), rstd


@device_shape("_fused_rms_norm_backward")
def _fused_rms_norm_backward_shape(grad_out: Tensor, input: Tensor, normalized_shape: list[int], rstd: Tensor,
                                   weight: Tensor | None,
                                   output_mask: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format) if output_mask[0] else None
    return grad_input, torch.empty_like(weight) if output_mask[1] and weight is not None else None


@device_shape("_weight_norm_interface_backward", on_any_device=True)
def weight_norm_backward(grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor,
                         dim: int) -> tuple[Tensor, Tensor]:
    """Contiguous gradients of direction and length (WeightNorm.cpp, WeightNorm.cu); torch 2.9 has no kernel on meta."""
    return saved_v.new_empty(saved_v.shape), saved_g.new_empty(saved_g.shape)


@host_kernel("group_norm")
def _normalize_groups(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
                      eps: float = 1e-5, cudnn_enabled: bool = True) -> Any:
    """On the CPU an input that is channels last stays so: ``aten/src/ATen/native/group_norm.cpp``."""
    layout = suggest_memory_format(input)
    if layout is torch.contiguous_format or num_groups <= 0 or input.shape[1] % num_groups:
        return NotImplemented
    batch, channels, *rest = input.shape
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    return ChannelsLastGroupNorm.apply(input.contiguous(memory_format=layout), weight, bias,
                                       (batch, channels, math.prod(rest), num_groups), eps, layout)


@with_node("NativeGroupNormBackward0")
class ChannelsLastGroupNorm(torch.autograd.Function):
    """``aten::native_group_norm``, whose formula (tools/autograd/derivatives.yaml) copies on all but the CPU."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: tuple[int, ...], eps: float,
                layout: torch.memory_format) -> Tensor:
        out, mean, rstd = call_whole(aten.native_group_norm.default, input, weight, bias, *sizes, eps)
        ctx.sizes, ctx.layout = sizes, layout
        ctx.save_for_backward(input, weight, mean, rstd)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, mean, rstd = ctx.saved_tensors
        gradient = grads[0].contiguous(memory_format=ctx.layout)
        return *call_whole(aten.native_group_norm_backward.default, gradient, input, mean, rstd, weight, *ctx.sizes,
                           list(ctx.needs_input_grad[:3])), None, None, None


# What the kernels of `torch.nn.SyncBatchNorm` return. Source: ``aten/src/ATen/native/cuda/Normalization.cu`` and
# ``Normalization.cuh`` (batch_norm_stats_cuda and those after it). Statistics of 16-bit tensors are float32.

def _statistics(like: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    return like.new_empty(like.shape[1], dtype=dtype), like.new_empty(like.shape[1], dtype=dtype)


device_shape("batch_norm_stats")(lambda input, eps: _statistics(input))
device_shape("batch_norm_gather_stats_with_counts")(lambda input, mean, *rest: _statistics(mean))


@device_shape("batch_norm_backward_reduce")
def _reduce(grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, input_g: bool,
            weight_g: bool, bias_g: bool) -> tuple[Tensor | None, ...]:
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    return *sums, *[torch.empty_like(weight) if weight is not None and asked else None for asked in (weight_g, bias_g)]
