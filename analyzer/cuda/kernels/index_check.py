"""Indices whose values are known and that point outside raise as they do on the CPU; a GPU ends with an assertion."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.value.contents import read_known

Tensor = torch.Tensor


def _first_outside(index: Tensor, low: int, high: int) -> int | None:
    """The first value of ``index`` that is not in [low, high), None where there is none or contents are unknown."""
    values = read_known(index) if index.dtype in (torch.int32, torch.int64) else None
    if values is None or not values.numel():
        return None
    with without_modes():
        outside = values[(values < low) | (values >= high)]
        return int(outside[0]) if outside.numel() else None


@device_kernel("embedding", on_any_device=True)
def embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    """``aten/src/ATen/native/Embedding.cpp``, by index_select. Raises IndexError."""
    if _first_outside(indices, 0, weight.shape[0]) is not None:
        raise IndexError("index out of range in self")
    return NotImplemented


@device_kernel("index_select", on_any_device=True)
def index_select(self: Tensor, dim: int, index: Tensor) -> Any:
    """``aten/src/ATen/native/TensorAdvancedIndexing.cpp``. Raises IndexError."""
    if self.dim() and _first_outside(index, 0, self.shape[dim]) is not None:
        raise IndexError("index out of range in self")
    return NotImplemented


@device_kernel("gather", on_any_device=True)
def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``aten/src/ATen/native/cpu/ScatterGatherKernel.cpp``. Raises RuntimeError."""
    size = self.shape[dim] if self.dim() else 1
    if (value := _first_outside(index, 0, size)) is not None:
        raise RuntimeError(f"index {value} is out of bounds for dimension {dim % max(1, self.dim())} with size {size}")
    return NotImplemented
