"""The table of rules: what an operator's kernels check of a call before they run; and what many check, of numbers."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from analyzer.registry import adding_to

Rule = Callable[..., None]

rules: dict[str, Rule] = {}
"""By the name of an ATen operator: ``rule(device_type, *args, **kwargs)`` raises what the kernel raises."""
refuses = adding_to(rules)
"""Decorator: a rule of the operators with these names."""

# Names of dtypes in messages of C++: c10/core/ScalarType.h
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
          torch.int32: "Int", torch.int64: "Long", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
          torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
          torch.complex32: "ComplexHalf"}


def name_dtype(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def wrap_dim(dim: int, dims: int) -> int:
    """``dim`` counted from the front, of ``dims`` dimensions: c10/core/WrapDimMinimal.cpp, maybe_wrap_dim. Raises
    IndexError.
    """
    most = max(dims, 1)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")
    return dim % most


def expands(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``wanted``: infer_expand_geometry, aten/src/ATen/ExpandUtils.cpp."""
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted)))


def is_integral(tensor: Any) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


# Numbers beside tensors: complex ones among real ones, factors of another kind.

_PRODUCTS = frozenset("addmm addmm_ addmv addmv_ addbmm addbmm_ baddbmm baddbmm_".split())
#: Operators whose numbers are converted to the dtype of their tensors; of others they take part in its promotion.
CONVERTING = _PRODUCTS | frozenset(
    "addcmul addcmul_ addcdiv addcdiv_ _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv _foreach_addcdiv_ lerp "
    "lerp_ fill_ full full_like new_full masked_fill masked_fill_ scatter scatter_ threshold threshold_ hardshrink "
    "softshrink leaky_relu leaky_relu_ softplus elu elu_ celu celu_ "
    "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_".split())
_C_TYPES = {torch.float64: "double", torch.int64: "int64_t", torch.int32: "int"}


def check_converted(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """c10/core/Scalar.h, Scalar::to: of complex numbers only those without an imaginary part have a real dtype."""
    given = [*args, *kwargs.values()]
    if not any(isinstance(a, complex) and a.imag for a in given):
        return
    tensors = [t for a in given for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)]
    dtypes = [kwargs["dtype"]] if kwargs.get("dtype") else [t.dtype for t in tensors]
    if not dtypes or any(d.is_complex for d in dtypes) or name in _PRODUCTS and not all(t.numel() for t in tensors):
        return
    raise RuntimeError(f"value cannot be converted to type {_C_TYPES.get(dtypes[0], 'float')} without overflow")


def check_alpha(self: Any, other: Any, alpha: Any) -> None:
    """aten/src/ATen/native/BinaryOps.h, alpha_check."""
    if type(alpha) is int:
        return
    dtype = torch.result_type(self, other)
    if isinstance(alpha, bool) and dtype is not torch.bool:
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if not isinstance(alpha, bool) and not dtype.is_floating_point and not dtype.is_complex:
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
    if isinstance(alpha, complex) and not dtype.is_complex:
        raise RuntimeError("For non-complex input tensors, argument alpha must not be a complex number.")
