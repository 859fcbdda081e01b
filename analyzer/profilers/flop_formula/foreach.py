"""Operators over lists (`_foreach_mul_` and the like): the operator of one tensor, on each element in turn."""
from __future__ import annotations

from functools import cache
from typing import Any

from analyzer.meta.spec import TensorSpec

from .registration import FlopCount, Formula
from .size import is_inexact, tensors

# Where the name without `_foreach_` is not the operator's.
SINGLE = {"norm": "linalg_vector_norm", "max": "amax", "powsum": "linalg__powsum"}


def is_list(value: Any) -> bool:
    """Whether ``value`` is a list of tensors or numbers."""
    return isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec)


@cache
def of_each(formula: Formula) -> Formula:
    """The formula that adds ``formula`` over the lists among the arguments; in place there is no result, but self.

    >>> import torch
    >>> a, b = (TensorSpec.of((n,), (1,), torch.float32, "cpu") for n in (3, 5))
    >>> of_each(lambda x, y, out: out.numel)([a, b], 2.0, out=None)
    FlopCount(flops=8, macs=0, executed_flops=None)
    """
    def each_flops(*args: Any, out: Any = None, **kwargs: Any) -> FlopCount | None:
        lists = [a for a in args if is_list(a) and any(True for _ in tensors(a))]
        total = FlopCount(0)
        for i in range(len(lists[0]) if lists else 0):
            at = [a[i] if is_list(a) else a for a in args]
            one = out[i] if is_list(out) and len(out) == len(lists[0]) else lists[0][i]
            if any(is_inexact(spec) for spec in tensors([*at, one])):
                count = formula(*at, out=one, **kwargs)
                if count is None:
                    return None
                total += count if isinstance(count, FlopCount) else FlopCount(int(count))
        return total

    return each_flops
