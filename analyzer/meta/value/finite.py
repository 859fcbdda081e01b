"""Questions whether floating data is finite, which it is assumed to be."""
from __future__ import annotations

import math
from typing import Any

import torch

_LARGEST_TESTED = 1 << 26  # elements, a bool each, made only if it is read
TESTS = frozenset({"isnan", "isinf", "isposinf", "isneginf", "isfinite", "eq", "ne"})
_FALSE = frozenset({"isnan", "isinf", "isposinf", "isneginf"})


def finite_answer(name: str, args: Any) -> bool | None:
    """What an operator gives for every element if its floating argument is finite; None where that does not follow.
    `torch.isfinite` arrives here as ``x == x`` and ``x.abs() != inf`` (aten/src/ATen/native/TensorCompare.cpp).
    """
    x = args[0]
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() > _LARGEST_TESTED:
        return None
    if name in _FALSE:
        return False
    if name == "isfinite":
        return True
    other = args[1]
    if isinstance(other, torch.Tensor):
        return name == "eq" if other is x else None
    return name == "ne" if other == math.inf else None
