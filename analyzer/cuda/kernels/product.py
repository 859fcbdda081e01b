"""Shapes of products that meta lacks: with sparse matrices, and of groups of rows in other dtypes than bfloat16."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape, registered
from analyzer.meta.shape_registry import sparse_shapes

Tensor = torch.Tensor


@device_shape("_grouped_mm", on_any_device=True)
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> Tensor:
    """``offs`` cuts rows, columns or the inner dimension of the 2-d operands into groups. Rows of the result start at
    multiples of 16 bytes, as the tensor memory accelerator needs. Sources: ``_grouped_mm_validate_inputs`` and
    ``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h, which CPU and CUDA share.
    """
    if (a.dim() == 3 and b.dim() == 3) == (offs is not None):
        raise RuntimeError("_grouped_mm: offs must be given where an operand is 2-d, and only there")
    if a.shape[-1] != b.shape[-2] or a.dtype != b.dtype or not a.is_floating_point() or a.dtype is torch.float64:
        raise RuntimeError(f"_grouped_mm: cannot multiply {a.dtype}{list(a.shape)} by {b.dtype}{list(b.shape)}")
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        size = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        size = [a.shape[0], b.shape[-1]]
    else:
        size = [a.shape[1], b.shape[1]] if b.dim() == 2 else [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    alignment = 16 // dtype.itemsize
    row = -(-size[-1] // alignment) * alignment
    return a.new_empty_strided(size, [row, 1] if len(size) == 2 else [size[1] * row, row, 1], dtype=dtype)


@device_shape("mm.dtype", "bmm.dtype", on_any_device=True)
def mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Torch 2.9 has no kernel for it on meta."""
    product: Tensor = (torch.ops.aten.mm if a.dim() == 2 else torch.ops.aten.bmm).default(a, b)
    return product.new_empty(product.shape, dtype=out_dtype)


@device_shape("addmm.dtype", on_any_device=True)
def addmm_dtype(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
    """The kernel of torch 2.9 on meta takes ``out_dtype`` for a factor."""
    product: Tensor = torch.ops.aten.addmm.default(self.new_empty(self.shape, dtype=mat1.dtype), mat1, mat2)
    return product.new_empty(product.shape, dtype=out_dtype)


@device_shape("_sparse_addmm")
@registered(("addmm",), sparse_shapes)
def shape_sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu: sparse times dense is dense."""
    return mat2.new_empty((mat1.shape[0], mat2.shape[1]))


@registered(("mm",), sparse_shapes)
def shape_sparse_mm(self: Tensor, mat2: Tensor, **_: Any) -> Tensor:
    """The same source."""
    dense = mat2 if self.layout is not torch.strided else self
    return torch.empty((self.shape[0], mat2.shape[1]), dtype=dense.dtype, device=dense.device)
