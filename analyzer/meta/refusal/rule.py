"""The table of rules: what an operator's kernels check of a call before they run."""
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
