"""Dropout on CUDA: one fused kernel that saves a boolean mask, where meta (and the CPU) multiply by a noise tensor.
Source: ``aten/src/ATen/native/Dropout.cpp``, is_fused_kernel_acceptable. The in-place variant and those of features and
alpha have no fused kernel: they run the same on both.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel

aten = torch.ops.aten


@device_kernel("dropout")
def _drop_out(input: torch.Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout.default(input, p, True)[0]
    return NotImplemented
