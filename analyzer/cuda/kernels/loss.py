"""Connectionist temporal classification, which torch cannot run on meta where its lengths are tensors.

Source: ``ctc_loss_gpu_template`` in ``aten/src/ATen/native/cuda/LossCTC.cu``.
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


@device_shape("_ctc_loss_backward.Tensor")
def ctc_loss_backward_shape(grad: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
