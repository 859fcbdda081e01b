"""Shapes of pooling gradients that have kernels on CUDA and CPU but none on meta."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape

Tensor = torch.Tensor


@device_shape("fractional_max_pool3d_backward")
def shape_like_input(grad_output: Tensor, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/cuda/FractionalMaxPool3d.cu: the gradient has the input's sizes."""
    return torch.empty_like(self, memory_format=torch.contiguous_format)
