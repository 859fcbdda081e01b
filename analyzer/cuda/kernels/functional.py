"""Functions of ``torch.nn.functional`` that CUDA, and the CPU in part, runs by other kernels than meta does."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape

Tensor = torch.Tensor
aten = torch.ops.aten


@device_kernel("dropout")
def _drop_out(input: Tensor, p: float, train: bool) -> Any:
    """``aten/src/ATen/native/Dropout.cpp``, is_fused_kernel_acceptable: one kernel that saves a boolean mask, where
    meta (and the CPU) multiply by a noise tensor. The in-place variant and those of features and alpha run the same on
    both.
    """
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout.default(input, p, True)[0]
    return NotImplemented


def _softmax(kernel: torch._ops.OpOverload) -> Callable[..., Any]:
    """``aten/src/ATen/native/SoftMax.cpp``: halves become float32 in one kernel, where elsewhere the input is converted
    first; bfloat16 has no such path.
    """
    def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if self.dtype is torch.float16 and dtype is torch.float32:
            return kernel(self, dim, True)
        return NotImplemented
    return softmax


device_kernel("softmax.int")(_softmax(aten._softmax.default))
device_kernel("log_softmax.int")(_softmax(aten._log_softmax.default))


def _activation_backward(kernel: torch._ops.OpOverload) -> Callable[..., Any]:
    """One kernel, where meta composes eight operators."""
    def backward(grad_output: Tensor, self: Tensor) -> Any:
        return NotImplemented if torch.is_grad_enabled() else call_whole(kernel, grad_output, self)
    return backward


device_kernel("silu_backward", on_any_device=True)(_activation_backward(aten.silu_backward.default))
device_kernel("mish_backward", on_any_device=True)(_activation_backward(aten.mish_backward.default))


@device_shape("log_sigmoid_forward")
def _log_sigmoid_shape(self: Tensor) -> tuple[Tensor, Tensor]:
    """``aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu`` recomputes what the CPU keeps in the buffer."""
    return torch.empty_like(self), self.new_empty(0)
