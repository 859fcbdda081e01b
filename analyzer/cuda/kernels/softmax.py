"""Softmax of halves into float32 on CUDA: one kernel, where elsewhere the input is converted first. Source: ``softmax``
and ``log_softmax`` in ``aten/src/ATen/native/SoftMax.cpp``; bfloat16 has no such path.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel

aten = torch.ops.aten


@device_kernel("softmax.int")
def _softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if self.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax.default(self, dim, True)
    return NotImplemented


@device_kernel("log_softmax.int")
def _log_softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if self.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax.default(self, dim, True)
    return NotImplemented
