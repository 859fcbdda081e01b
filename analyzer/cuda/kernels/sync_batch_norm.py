"""What the kernels of `torch.nn.SyncBatchNorm` return. Source: ``aten/src/ATen/native/cuda/Normalization.cu`` and
``Normalization.cuh`` (batch_norm_stats_cuda and those after it). Statistics of 16-bit tensors are float32.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape

Tensor = torch.Tensor


def _statistic(like: Tensor, channels: int) -> Tensor:
    half = like.dtype in (torch.float16, torch.bfloat16)
    return like.new_empty(channels, dtype=torch.float32 if half else like.dtype)


@device_shape("batch_norm_stats")
def _measure(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _statistic(input, input.shape[1]), _statistic(input, input.shape[1])


@device_shape("batch_norm_gather_stats_with_counts")
def _merge(input: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _statistic(mean, mean.shape[1]), _statistic(mean, mean.shape[1])


@device_shape("batch_norm_elemt")
def _normalize(input: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(input)


@device_shape("batch_norm_backward_reduce")
def _reduce(grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, input_g: bool,
            weight_g: bool, bias_g: bool) -> tuple[Tensor | None, ...]:
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    return *sums, *[torch.empty_like(weight) if weight is not None and asked else None for asked in (weight_g, bias_g)]


@device_shape("batch_norm_backward_elemt")
def _differentiate(grad_out: Tensor, input: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(input)
