"""Activations whose kernels on CUDA, and some on the CPU too, are not those that torch runs on meta."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.function import call_whole
from analyzer.cuda.kernel_registry import device_kernel, device_shape, host_shape

Tensor = torch.Tensor
aten = torch.ops.aten


@device_kernel("silu_backward", on_any_device=True)
def silu_backward(grad_output: Tensor, self: Tensor) -> Any:
    """One kernel, where meta composes eight operators."""
    return NotImplemented if torch.is_grad_enabled() else call_whole(aten.silu_backward.default, grad_output, self)


@device_kernel("mish_backward", on_any_device=True)
def _mish_backward(grad_output: Tensor, self: Tensor) -> Any:
    return NotImplemented if torch.is_grad_enabled() else call_whole(aten.mish_backward.default, grad_output, self)


@device_shape("silu_backward", "mish_backward")
@host_shape("silu_backward", "mish_backward")
def _activation_backward_shape(grad_output: Tensor, self: Tensor) -> Tensor:
    return torch.empty_like(grad_output)  # TensorIterator takes the layout of the first operand


@device_shape("log_sigmoid_forward")
def log_sigmoid_shape(self: Tensor) -> tuple[Tensor, Tensor]:
    """``aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu`` recomputes what the CPU keeps in the buffer."""
    return torch.empty_like(self), self.new_empty(0)
