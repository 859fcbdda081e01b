"""Strides of what pointwise operators give, where torch's meta kernels get them wrong.

These kernels (``torch/_refs``) convert arguments to the dtype in which is computed, and find the strides of the result
from the converted ones. A tensor that is expanded, as the gradient of a sum, is contiguous when it was converted; in
the kernels of devices (TensorIterator) it has no say in the order of dimensions. Only the CPU converts as meta does,
and only where dtypes differ (TensorIterator.cpp, promote_inputs_to_common_dtype).
"""
from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

Tensor = torch.Tensor


def lay_out_pointwise(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], result: Any, kind: str) -> Any:
    """``result`` of a call on meta, in the order of dimensions that a device of a ``kind`` gives it."""
    if type(result) is not Tensor or torch.Tag.pointwise not in op.tags or op._schema.is_mutable or result.dim() < 2:
        return result
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    dtypes = {t.dtype for t in given} - {torch.bool}
    if len(given) < 2 or dtypes == {torch.float32} or not any(map(is_expanded, given)):
        return result
    if kind == "cpu" and len(dtypes) > 1:
        return result
    args, kwargs = tree_map_only(Tensor, _as_float32, (args, kwargs))
    try:
        strides = op(*args, **kwargs).stride()
    except (RuntimeError, TypeError):  # an operator of other dtypes
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def like_sum(one: Tensor, other: Tensor) -> Tensor:
    """An empty tensor on meta like the sum of two of one dtype, as TensorIterator lays it out."""
    total = _as_float32(one) + _as_float32(other)
    return torch.empty_strided(total.shape, total.stride(), dtype=one.dtype, device=one.device)


def is_expanded(tensor: Tensor) -> bool:
    """Whether one place in memory is several of its elements."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))


def _as_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32, device=tensor.device)
