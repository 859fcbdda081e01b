"""Where C++ code works in place on CUDA but out of place on meta. Before it overwrites a temporary, ATen asks
``areAnyTensorSubclassLike`` (``aten/src/ATen/TensorSubclassLikeUtils.h``), which is true of meta tensors and under any
dispatch mode: the out-of-place form keeps one more tensor alive for a moment.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, new_on_device_of

Tensor = torch.Tensor
aten = torch.ops.aten


@device_kernel("gather_backward", on_any_device=True)
def _gather_backward(grad: Tensor, self: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Any:
    if sparse_grad:
        return NotImplemented
    return aten.scatter_add_.default(aten.new_zeros.default(grad, self.shape), dim, index, grad)


@device_kernel("index_select_backward", on_any_device=True)
def _index_select_backward(grad: Tensor, self_sizes: list[int], dim: int, index: Tensor) -> Any:
    return aten.index_add_.default(aten.new_zeros.default(grad, self_sizes, dtype=grad.dtype), dim, index, grad)


@device_kernel("value_selecting_reduction_backward", on_any_device=True)
def value_selecting_reduction_backward(grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool) -> Any:
    """Gradient of ``max(dim)``, ``sort``, ``topk`` and the like."""
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    zeros = new_on_device_of(grad, aten.zeros.default, list(sizes), dtype=grad.dtype)
    return aten.scatter_.src(zeros, dim, indices, grad)


@device_kernel("index_put", on_any_device=True)
def index_put(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``index_backward`` adds into the zeros that were made for it; a user's own call makes a copy on CUDA too."""
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("IndexBackward") or not accumulate or torch.is_grad_enabled():
        return NotImplemented
    return aten._index_put_impl_.default(self, indices, values, True, True)


@device_kernel("linear", on_any_device=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """aten/src/ATen/native/Linear.cpp: an input that is not flattened to a matrix gets its bias after the product."""
    if bias is None or input.dim() <= 2 or input.is_contiguous() or weight.dim() != 2:
        return NotImplemented
    return aten.add_.Tensor(aten.matmul.default(input, aten.t.default(weight)), bias)
