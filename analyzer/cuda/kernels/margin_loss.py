"""Shapes of losses that have kernels on CUDA and CPU but none on meta."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape

Tensor = torch.Tensor


@device_shape("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def shape_like_input(grad_output: Tensor, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/cuda/MultiMarginLoss.cu and MultiLabelMarginCriterion.cu: the gradient has the input's
    layout.
    """
    return torch.empty_like(self, memory_format=torch.contiguous_format)


@device_shape("multi_margin_loss")
def shape_multi_margin(self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
                       reduction: int = 1) -> Tensor:
    """aten/src/ATen/native/cuda/MultiMarginLoss.cu: one loss per row (0 is no reduction), else a scalar."""
    return self.new_empty(target.shape if reduction == 0 and target.dim() > 0 else ())


@device_shape("multilabel_margin_loss_forward")
def shape_multilabel_margin(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu: the loss, and which classes are targets."""
    return self.new_empty(self.shape[:1] if reduction == 0 and self.dim() == 2 else ()), self.new_empty(target.shape)
