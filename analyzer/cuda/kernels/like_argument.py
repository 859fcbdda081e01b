"""Kernels whose result is shaped like an argument, where meta has none or one that returns something else."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape
from analyzer.meta.dispatch.layout import like_sum

Tensor = torch.Tensor


def _like(position: int, layout: torch.memory_format = torch.contiguous_format) -> Callable[..., Tensor]:
    def shape(*args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(args[position], memory_format=layout)
    return shape


# aten/src/ATen/native/transformers/attention.cpp
device_shape("_masked_softmax")(_like(0))
# aten/src/ATen/native/cuda/LossCTC.cu, MultiMarginLoss.cu, MultiLabelMarginCriterion.cu and FractionalMaxPool3d.cu
device_shape("_ctc_loss_backward.Tensor", "multi_margin_loss_backward", "multilabel_margin_loss_backward",
             "fractional_max_pool3d_backward")(_like(1))
device_shape("silu_backward", "mish_backward", on_any_device=True)(like_sum)
device_shape("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine")(
    _like(0, torch.preserve_format))
