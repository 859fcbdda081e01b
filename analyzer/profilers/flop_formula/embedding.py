"""Embedding bags and norms of embeddings (a plain embedding moves rows and does no arithmetic)."""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, register_each
from .size import multiply_adds


def embedding_bag_flops(weight: Spec, indices: Spec, offsets: Spec, scale_grad_by_freq: bool = False, mode: int = 0,
                        sparse: bool = False, per_sample_weights: Any = None, *_: Any, out: Any = None,
                        **__: Any) -> FlopCount:
    """Each index adds a row (mode 0), adds it to a mean (1) or compares it (2); with weights it is a multiply-add."""
    elements = indices.numel * weight[-1]
    return FlopCount(elements) if per_sample_weights is None else multiply_adds(elements)


def embedding_bag_backward_flops(grad: Spec, indices: Spec, offsets: Spec, offset2bag: Spec, bag_size: Spec,
                                 maximum_indices: Spec, num_weights: int, scale_grad_by_freq: bool, mode: int,
                                 sparse: bool = False, per_sample_weights: Any = None, *_: Any, out: Any = None,
                                 **__: Any) -> FlopCount:
    """Each index adds its bag's gradient, ÷ the bag's size in mode 1, × a weight if given; mode 2 adds once a bag."""
    if mode == 2:
        return FlopCount(grad.numel)
    elements = indices.numel * grad[-1]
    return multiply_adds(elements) if per_sample_weights is not None else FlopCount(elements * (2 if mode == 1 else 1))


def embedding_bag_dense_backward_flops(grad: Spec, indices: Spec, offset2bag: Spec, bag_size: Spec,
                                       maximum_indices: Spec, num_weights: int, scale_grad_by_freq: bool, mode: int,
                                       per_sample_weights: Any = None, *_: Any, out: Any = None,
                                       **__: Any) -> FlopCount:
    """FLOPs of ``_embedding_bag_dense_backward``."""
    return embedding_bag_backward_flops(grad, indices, offset2bag, offset2bag, bag_size, maximum_indices, num_weights,
                                        scale_grad_by_freq, mode, False, per_sample_weights)


register_each("_embedding_bag _embedding_bag_forward_only embedding_bag", embedding_bag_flops)
register_each("_embedding_bag_backward", embedding_bag_backward_flops)
register_each("_embedding_bag_dense_backward", embedding_bag_dense_backward_flops)
# The dot product of a row and its bag's gradient, for each index
register_each("_embedding_bag_per_sample_weights_backward",
    lambda grad, weight, indices, *_, **__: multiply_adds(indices.numel * weight[-1]))
# Norm (2) and scale (1) of each row addressed, taken as distinct and all over the limit
register_each("embedding_renorm", lambda weight, indices, *_, **__: 3 * indices.numel * weight[-1])
