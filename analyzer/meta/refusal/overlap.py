"""What an operator refuses to write to: a tensor whose elements lie one over another, or over what it reads; in place
also one of another shape, or of a narrower kind, than the result.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .rule import name_dtype

Tensor = torch.Tensor

# Kernels besides pointwise ones that look at ``out``: assert_no_internal_overlap and assert_no_overlap in
# TensorAdvancedIndexing.cpp, TensorShape.cpp, Sorting.cpp, ReduceOps.cpp and Distributions.cpp (aten/src/ATen/native).
_LOOKING = {"index_select", "take", "cat", "kthvalue", "masked_select", "bernoulli", "gather", "median", "nanmedian"}
# The same of operators that write to their first argument. Those of the second set may not read the whole of it either.
_LOOKING_IN_PLACE = {"copy_", "bernoulli_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_", "copysign_", "floor_divide_",
                     "gcd_", "lcm_", "heaviside_", "masked_fill_"}
_WRITING_APART = {"index_add_", "index_copy_", "index_fill_", "index_put_", "_index_put_impl_", "index_reduce_",
                  "put_", "scatter_", "scatter_add_", "scatter_reduce_"}


def looks_in_place(op: torch._ops.OpOverload, name: str) -> bool:
    """Whether the kernel of an operator looks for what its other arguments share with the tensor that it writes to.

    >>> [looks_in_place(op, op.overloadpacket.__name__) for op in (
    ...     torch.ops.aten.add_.Tensor, torch.ops.aten.scatter_add_.default, torch.ops.aten.ldexp_.default)]
    [True, True, False]
    """
    if op.namespace != "aten" or name == "ldexp_":  # which is no kernel of its own
        return False
    is_known = name in _LOOKING_IN_PLACE or name in _WRITING_APART
    return is_known or name.endswith("_") and not name.startswith("_") and torch.Tag.pointwise in op.tags


def check_in_place(name: str, written: Tensor, given: Iterable[Tensor]) -> None:
    """Raise RuntimeError where what an operator reads lies over what it writes to, as `check_outputs`."""
    may_be_whole = name not in _WRITING_APART
    if any(_overlap(written, t, may_be_whole) for t in given if not (may_be_whole and t is written)):
        raise RuntimeError(_message("some elements of the input tensor and the written-to tensor refer"))


def check_outputs(op: torch._ops.OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError where a result is to be written to a place that does not take it: ``aten/src/ATen/
    MemoryOverlap.cpp``. Pointwise kernels may write to the whole of what they read.
    """
    is_pointwise = torch.Tag.pointwise in op.tags
    if not is_pointwise and name not in _LOOKING:
        return
    names = {a.name for a in op._schema.arguments if a.is_out}
    outputs = [t for n, t in kwargs.items() if n in names and isinstance(t, Tensor)]
    inputs = [t for t in tree_leaves((args, {n: t for n, t in kwargs.items() if n not in names}))
              if isinstance(t, Tensor)]
    for out in outputs:
        if out.layout is not torch.strided:
            continue
        if name == "cat" and any(out is t for t in inputs):  # also of no elements, as it is made larger
            raise RuntimeError(_message("some elements of the input tensor and the written-to tensor refer"))
        if not out.numel():
            continue
        if any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride())):
            raise RuntimeError(_message("more than one element of the written-to tensor refers"))
        if any(_overlap(out, t, is_pointwise) for t in inputs):
            raise RuntimeError(_message("some elements of the input tensor and the written-to tensor refer"))


def _message(what: str) -> str:
    return (f"unsupported operation: {what} to a single memory location. Please clone() the tensor before performing "
            "the operation.")


def _overlap(out: Tensor, given: Tensor, may_be_whole: bool) -> bool:
    if given.layout is not torch.strided or not given.numel() or not (is_dense(out) and is_dense(given)):
        return False  # too hard to tell
    if out.untyped_storage()._cdata != given.untyped_storage()._cdata:
        return False
    begin, end = out.storage_offset() * out.itemsize, given.storage_offset() * given.itemsize
    if begin == end and out.nbytes == given.nbytes and out.stride() == given.stride():
        return not may_be_whole
    return begin < end + given.nbytes and end < begin + out.nbytes


def is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor lie side by side, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# Results of pointwise operators that are written to their first argument.

#: which compute in the dtype that all arguments promote to, and write it: TensorIterator.cpp, compute_types. Others
#: are checked by their kernels on meta, or give booleans, which every dtype holds.
_PROMOTING = frozenset("mul_ addcmul_ addcdiv_ ldexp_ logit_".split())
#: pointwise operators in place that have no tag of that name
UNTAGGED = frozenset("eq_ ne_ lt_ le_ gt_ ge_ copysign_ floor_divide_ heaviside_ gcd_ lcm_".split())
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}


def _kind(dtype: torch.dtype) -> int:
    """Of c10/core/ScalarType.h, canCast: none is cast to one that comes before it."""
    return 0 if dtype is torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def check_in_place_result(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError as ``aten/src/ATen/TensorIterator.cpp`` (mark_resize_outputs, compute_types)."""
    self, *others = args
    tensors = [a for a in (*others, *kwargs.values()) if isinstance(a, Tensor)]
    if any(t.layout is not torch.strided or t.is_nested for t in (self, *tensors)):
        return
    shape = torch.broadcast_shapes(self.shape, *(t.shape for t in tensors))
    if shape != self.shape:
        raise RuntimeError(f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(shape)}")
    if name not in _PROMOTING:
        return
    numbers = [_NUMBERS[type(a)] for a in others if type(a) in _NUMBERS]
    given = [self.dtype, *(t.dtype for t in tensors), *numbers, *([torch.get_default_dtype()] * (name == "logit_"))]
    widest = max(given, key=_kind)
    if _kind(widest) > _kind(self.dtype):
        raise RuntimeError(f"result type {name_dtype(widest)} can't be cast to the desired output type "
                           f"{name_dtype(self.dtype)}")
