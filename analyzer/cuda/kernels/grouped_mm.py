"""Products of groups of rows: torch's meta kernel takes bfloat16 only, the kernels take float32 and float16 as well.
Sources: ``_grouped_mm_validate_inputs`` and ``create_grouped_gemm_output_tensor`` in
aten/src/ATen/native/GroupedMMUtils.h, which CPU and CUDA share.
"""
from __future__ import annotations

import torch

from analyzer.cuda.kernel_registry import device_shape, host_shape

Tensor = torch.Tensor


@host_shape("_grouped_mm")
@device_shape("_grouped_mm")
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> Tensor:
    """``offs`` cuts rows, columns or the inner dimension of the 2-d operands into groups. Rows of the result start at
    multiples of 16 bytes, as the tensor memory accelerator needs.
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
