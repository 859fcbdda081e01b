"""Pooling. A window of k elements is k - 1 sums and a quotient, or k - 1 comparisons and a start: k FLOPs an output."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .registration import Formula, register_each
from .size import first, spread


def pool(dims: int) -> Formula:
    """The formula of pooling in ``dims`` dimensions."""
    return lambda x, kernel_size, *_, out, **__: first(out).numel * prod(spread(kernel_size, dims))


def average_backward(dims: int) -> Formula:
    """Counts grad ÷ k once, and a sum into each of the window's k elements."""
    return lambda grad, x, kernel_size, *_, **__: grad.numel * (prod(spread(kernel_size, dims)) + 1)


def window_elements(sizes: Sequence[int], outputs: Sequence[int]) -> int:
    """Elements of all windows of an adaptive pooling: window i of n spans from ⌊i·size/n⌋ to ⌈(i+1)·size/n⌉.

    >>> window_elements([7], [3]), window_elements([4, 4], [2, 2])
    (9, 16)
    """
    return prod(sum(-(-(i + 1) * size // n) - i * size // n for i in range(n)) for size, n in zip(sizes, outputs))


def adaptive(dims: int) -> Formula:
    """The formula of adaptive pooling in ``dims`` dimensions."""
    return lambda x, *_, out, **__: prod(x[:-dims]) * window_elements(x[-dims:], first(out)[-dims:])


def adaptive_average_backward(dims: int) -> Formula:
    """The formula of its gradient."""
    return lambda grad, x, *_, **__: grad.numel + prod(x[:-dims]) * window_elements(x[-dims:], grad[-dims:])


register_each("avg_pool1d max_pool1d max_pool1d_with_indices quantized_max_pool1d", pool(1))
register_each(
    "avg_pool2d max_pool2d max_pool2d_with_indices fractional_max_pool2d mkldnn_max_pool2d quantized_max_pool2d",
    pool(2))
register_each(
    "avg_pool3d max_pool3d max_pool3d_with_indices fractional_max_pool3d mkldnn_max_pool3d quantized_max_pool3d",
    pool(3))
register_each("avg_pool2d_backward", average_backward(2))
register_each("avg_pool3d_backward", average_backward(3))
register_each("adaptive_avg_pool1d adaptive_max_pool1d", adaptive(1))
register_each("adaptive_avg_pool2d _adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d adaptive_max_pool2d", adaptive(2))
register_each("adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d", adaptive(3))
register_each("_adaptive_avg_pool2d_backward mkldnn_adaptive_avg_pool2d_backward", adaptive_average_backward(2))
register_each("_adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward", adaptive_average_backward(3))
