"""Reductions, scans, sorts and sums by index.

A reduction counts the operations on each input element, its accumulation among them (so a sum of n counts n);
what is done once per result is left out, but for a mean, whose n - 1 sums and one quotient make n exactly.
Finding an extreme counts its comparisons; a boolean result (any, all, count_nonzero) counts none.
"""
from __future__ import annotations

from math import ceil, log2, prod
from typing import Any

import torch

from analyzer.meta.spec import TensorSpec

from .pointwise import COMPLEX_FLOPS
from .registration import Formula, register_each
from .size import broadcast, per_input, tensors

Spec = TensorSpec

# FLOPs to one input element.
REDUCTION_FLOPS = {
    "sum": 1, "nansum": 1, "mean": 1, "prod": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1,
    "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "_cummax_helper": 1, "_cummin_helper": 1, "sum_to_size": 1,
    "aminmax": 2, "_aminmax": 2,
    "var": 4, "std": 4, "var_mean": 4, "std_mean": 4,   # mean's sum; x - mean, square, sum
    "logsumexp": 4,                                     # maximum, - maximum, exp, sum
    "_logcumsumexp": 7, "logcumsumexp": 7,              # a logaddexp each
    # - lowest, × bins / range, count
    "histc": 3, "histogram": 3, "_histogramdd_from_bin_cts": 3, "_histogramdd_from_bin_tensors": 3,
    "_histogramdd_bin_edges": 2,                        # lowest and highest
    "segment_reduce": 1, "bincount": 1}


def reduction(name: str, flops: int) -> Formula:
    """The formula of ``flops`` operations for each input element."""
    def reduction_flops(x: Spec, *_: Any, out: Any = None, **__: Any) -> int:
        return flops * x.numel * (COMPLEX_FLOPS.get(name, 2) if x.dtype.is_complex else 1)

    return reduction_flops


def norm_flops(x: Spec, order: Any = 2, *_: Any, out: Any = None, **__: Any) -> int:
    """|x|ᵖ and its sum: 2 FLOPs an element for p of 1, 2 or infinity, 3 (abs, pow, +) for others."""
    simple = order is None or order in (0, 1, 2, float("inf"), float("-inf"))
    return x.numel * (2 if simple else 3) * (2 if x.dtype.is_complex else 1)


def dist_flops(x: Spec, other: Spec, p: Any = 2, *_: Any, out: Any = None, **__: Any) -> int:
    """The norm of a difference."""
    return x.numel + norm_flops(x, p)


def trace_flops(x: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """FLOPs of ``trace``."""
    return min(x)


def sorted_flops(x: Spec, *args: Any, out: Any = None, **kwargs: Any) -> int:
    """A comparison sort of each row: n ⌈log₂ n⌉ comparisons (Knuth, TAOCP 3, 5.3.1). CUDA's radix sorts do none.

    >>> sorted_flops(TensorSpec.of((3, 8), (8, 1), torch.float32, "cpu"))
    72
    """
    dim = next((int(a) for a in (*args, kwargs.get("dim")) if isinstance(a, int) and not isinstance(a, bool)), -1)
    return whole_rows_flops(x, x[dim] if x else 1)


def whole_rows_flops(x: Spec, row: int) -> int:
    """FLOPs of whole rows."""
    return x.numel * ceil(log2(row)) if row > 1 else 0


def topk_flops(x: Spec, k: int, dim: int = -1, *_: Any, out: Any = None, **__: Any) -> int:
    """FLOPs of ``topk``, ``kthvalue``."""
    return whole_rows_flops(x, x[dim] if x else 1)


def selected_flops(x: Spec, *args: Any, out: Any = None, **_: Any) -> int:
    """The median over a dimension, or over all."""
    return sorted_flops(x, *args) if args else whole_rows_flops(x, x.numel)


def unique_flops(x: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """FLOPs of ``_unique``, ``_unique2``."""
    return whole_rows_flops(x, x.numel)


def multinomial_flops(probabilities: Spec, num_samples: int, replacement: bool = False, *_: Any, out: Spec,
                      **__: Any) -> int:
    """Without replacement: p ÷ exponential (3), largest of each row; with: cumulative sums (2), binary search."""
    if not replacement or num_samples == 1:
        return 5 * probabilities.numel
    return 2 * probabilities.numel + out.numel * ceil(log2(probabilities[-1] + 1))


def search_flops(sorted_sequence: Any, values: Any, *_: Any, out: Spec, **__: Any) -> int:
    """Binary search: ⌈log₂(n + 1)⌉ comparisons a value."""
    return out.numel * ceil(log2(sorted_sequence[-1] + 1))


def bucketize_flops(values: Any, boundaries: Spec, *_: Any, out: Spec, **__: Any) -> int:
    """FLOPs of ``bucketize``."""
    return search_flops(boundaries, values, out=out)


def index_add_flops(_self: Spec, _dim: int, _index: Spec, source: Spec, alpha: Any = 1, *_: Any, out: Any = None,
                    **kwargs: Any) -> int:
    """One sum an element of the source, and a product where alpha is not 1."""
    return source.numel * (1 if kwargs.get("alpha", alpha) == 1 else 2)


def scatter_flops(_self: Spec, _dim: int, index: Spec, *_: Any, out: Any = None, reduce: str | None = None,
                  **__: Any) -> int:
    """Moves elements; with ``reduce``, one operation for each index."""
    return 0 if reduce is None else index.numel


def scatter_add_flops(_self: Spec, _dim: int, index: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """FLOPs of ``scatter_add``, ``scatter_reduce``."""
    return index.numel


def index_put_flops(self: Spec, indices: Any, values: Spec, accumulate: bool = False, *_: Any, out: Any = None,
                    **__: Any) -> int:
    """Moves elements; accumulating adds one for each element addressed.

    A boolean index addresses a number of elements that is data: those of ``values`` stand for it.

    >>> grid, i = (TensorSpec.of(s, (1,) * len(s), t, "cpu") for s, t in (((5, 7), torch.float32), ((3,), torch.int64)))
    >>> [index_put_flops(grid, *args) for args in (([i], grid, True), ([None, i], grid, True), ([i], grid))]
    [21, 15, 0]
    """
    if not accumulate:
        return 0
    given = list(tensors(indices))
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return values.numel
    untouched: int = prod(s for d, s in enumerate(self) if d >= len(indices) or indices[d] is None)
    return prod(broadcast(*given)) * untouched


def put_flops(_self: Spec, index: Spec, _source: Spec, accumulate: bool = False, *_: Any, out: Any = None,
              **__: Any) -> int:
    """FLOPs of ``put``."""
    return index.numel if accumulate else 0


for _name, _flops in REDUCTION_FLOPS.items():
    register_each(_name, reduction(_name, _flops))
del _name, _flops
register_each("linalg_vector_norm norm native_norm linalg__powsum", norm_flops)
register_each("dist", dist_flops)
register_each("trace", trace_flops)
register_each("sort argsort mode unique_dim", sorted_flops)
register_each("topk kthvalue", topk_flops)
register_each("median nanmedian", selected_flops)
register_each("_unique _unique2", unique_flops)
register_each("multinomial", multinomial_flops)
register_each("searchsorted", search_flops)
register_each("bucketize", bucketize_flops)
register_each("index_add", index_add_flops)
register_each("scatter", scatter_flops)
register_each("scatter_add scatter_reduce", scatter_add_flops)
register_each("index_reduce _unsafe_masked_index_put_accumulate", per_input(1, position=3))
register_each("index_put _index_put_impl _unsafe_index_put", index_put_flops)
register_each("put", put_flops)
register_each("_segment_reduce_backward", per_input(1, position=2))
register_each("embedding_dense_backward unfold_backward", per_input(1))  # gradients summed into place
register_each(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "max_pool2d_backward mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "col2im", per_input(1))
