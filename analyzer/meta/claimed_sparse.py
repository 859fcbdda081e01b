"""Shapes of products with sparse matrices, which have no kernels on meta."""
from __future__ import annotations

from typing import Any

import torch

from .claimed import claimed_shape

Tensor = torch.Tensor


@claimed_shape("_sparse_addmm", "addmm")
def shape_sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu: sparse times dense is dense."""
    return mat2.new_empty((mat1.shape[0], mat2.shape[1]))


@claimed_shape("mm")
def shape_mm(self: Tensor, mat2: Tensor, **_: Any) -> Tensor:
    """The product of two dense matrices, or of a sparse and a dense one, is dense: the same source."""
    return (mat2 if self.layout is not torch.strided else self).new_empty((self.shape[0], mat2.shape[1]), layout=torch.strided)
