"""Shapes of products with sparse matrices, which have no kernels on meta."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape
from analyzer.meta.shape_registry import sparse_shapes

Tensor = torch.Tensor


@device_shape("_sparse_addmm")
@device_shape("addmm", table=sparse_shapes)
def shape_sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu: sparse times dense is dense."""
    return mat2.new_empty((mat1.shape[0], mat2.shape[1]))


@device_shape("mm", table=sparse_shapes)
def shape_sparse_mm(self: Tensor, mat2: Tensor, **_: Any) -> Tensor:
    """The same source."""
    dense = mat2 if self.layout is not torch.strided else self
    return torch.empty((self.shape[0], mat2.shape[1]), dtype=dense.dtype, device=dense.device)
