"""Losses whose kernels return other storages than meta's, or cannot run there. Connectionist temporal classification
cannot where its lengths are tensors; source: ``ctc_loss_gpu_template`` in ``aten/src/ATen/native/cuda/LossCTC.cu``.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape

Tensor = torch.Tensor


@device_shape("_ctc_loss.Tensor")
def ctc_loss_shape(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *args: Any,
                   **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The loss of each sequence and the logarithms of alpha; targets are taken to be as long as their tensor allows."""
    steps, batch = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


@device_shape("mse_loss", "smooth_l1_loss", "soft_margin_loss", on_any_device=True)
def elementwise_loss_shape(self: Tensor, target: Tensor, reduction: int = 1, *_: Any, **__: Any) -> Tensor:
    """The loss of each element; a mean or sum is written into the first of them, and the storage keeps its size.
    BinaryOps.cpp (TORCH_META_FUNC of mse_loss and smooth_l1_loss) and Loss.cpp (soft_margin_loss_out).
    """
    out = self + target  # the layout that TensorIterator gives
    return out.resize_(()) if reduction else out


@device_shape("binary_cross_entropy", on_any_device=True)
def binary_cross_entropy_shape(self: Tensor, target: Tensor, weight: Tensor | None = None,
                               reduction: int = 1) -> Tensor:
    """The same: Loss.cpp, binary_cross_entropy_out_cpu, and cuda/Loss.cu."""
    out = torch.empty_like(self)
    return out.resize_(()) if reduction else out


@device_shape("multi_margin_loss")
def shape_multi_margin(self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
                       reduction: int = 1) -> Tensor:
    """aten/src/ATen/native/cuda/MultiMarginLoss.cu: one loss per row (0 is no reduction), else a scalar."""
    return self.new_empty(target.shape if reduction == 0 and target.dim() > 0 else ())


@device_shape("multilabel_margin_loss_forward")
def shape_multilabel_margin(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu: the loss, and which classes are targets."""
    return self.new_empty(self.shape[:1] if reduction == 0 and self.dim() == 2 else ()), self.new_empty(target.shape)
