"""Draws from distributions whose kernels meta lacks."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape


@device_shape("_sample_dirichlet", "_standard_gamma", on_any_device=True)
def shape_draw(concentration: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """aten/src/ATen/native/Distributions.cpp: one draw for each element."""
    return torch.empty_like(concentration, memory_format=torch.contiguous_format)
