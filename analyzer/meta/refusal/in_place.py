"""What pointwise operators refuse to write to their first argument: results of another shape or of a wider kind."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .rule import name_dtype

Tensor = torch.Tensor

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
