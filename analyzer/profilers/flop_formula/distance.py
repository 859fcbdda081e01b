"""Distances between the rows of x1 [..., p, m] and x2 [..., r, m]."""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, register_each
from .size import multiply_adds


def pair_flops(p: float) -> int:
    """An element of a pair: difference, |·| or square, + (or maximum); pow too for other exponents; a count for 0."""
    return 3 if p in (1, 2, float("inf")) else 1 if p == 0 else 4


def cdist_backward_flops(grad: Spec, x1: Spec, x2: Spec, p: float, *_: Any, out: Any = None, **__: Any) -> int:
    """Difference, ÷ distance and × grad, + : 4; two more (abs, pow) for other exponents."""
    return grad.numel * x1[-1] * (0 if p == 0 else 4 if p in (1, 2, float("inf")) else 6)


register_each("_cdist_forward", lambda x1, x2, p, *_, out, **__: out.numel * x1[-1] * pair_flops(p))
register_each("_cdist_backward", cdist_backward_flops)
register_each("_pdist_forward", lambda x, p=2, *_, out, **__: out.numel * x[-1] * pair_flops(p))
register_each("_pdist_backward", lambda grad, x, p, *_, **__: cdist_backward_flops(grad, x, x, p))
# √ of [-2 x1, |x1|², 1]·[x2, 1, |x2|²]: a product of m + 2 columns, the squared norms, × -2, maximum and root
register_each("_euclidean_dist", lambda x1, x2, *_, out, **__: (
    multiply_adds(out.numel * (x1[-1] + 2), x1) + FlopCount(3 * x1.numel + 2 * x2.numel + 2 * out.numel)))
