"""Operators of sparse tensors, counted by the elements that are stored (all of a block's, in a layout of blocks)."""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, Formula, multiply_adds


def stored(spec: Spec) -> int:
    """Elements that a sparse tensor stores.

    >>> import torch
    >>> f32 = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> stored(Spec.of((4, 9), (), torch.float32, "cpu", (f32(2, 5), f32(5))))
    5
    """
    return spec.parts[-1].numel


def product_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount | None:
    """A multiply-add for each stored element and column of the dense operand (row, where that is the first)."""
    if a.parts and b.parts:
        return None
    sparse, lines = (a, b.numel // b[0] if b[0] else 0) if a.parts else (b, a.numel // a[-1] if a[-1] else 0)
    return multiply_adds(stored(sparse) * lines, sparse)


def sum_flops(self: Spec, other: Spec, *_: Any, alpha: Any = 1, out: Any = None, **__: Any) -> FlopCount | None:
    """Into a dense tensor each stored element is added; the elements of two sparse ones are only put together."""
    if self.parts and other.parts:
        return FlopCount(0)
    return FlopCount((1 if alpha == 1 else 2) * stored(self if self.parts else other))


FORMULAS: dict[str, Formula] = {
    "mm": product_flops, "mv": product_flops, "add": sum_flops,
    **dict.fromkeys(("addmm", "_sparse_addmm", "addmv"), lambda _self, a, b, *_, **__: product_flops(a, b)),
    **dict.fromkeys(("mul", "div"),
                    lambda a, b, *_, **__: FlopCount(stored(a if isinstance(a, Spec) and a.parts else b))),
    "sum": lambda x, *_, **__: FlopCount(max(0, stored(x) - 1)),
}
"""By the name of an operator of ATen, what it counts where it takes or gives a sparse tensor; of others, which have
arithmetic, nothing is known: adding up elements at one place depends on data."""
