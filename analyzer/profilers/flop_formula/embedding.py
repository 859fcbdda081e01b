"""Embedding bags and norms of embeddings (a plain embedding moves rows and does no arithmetic)."""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec

from .registration import FlopCount, register_each
from .size import multiply_adds

Spec = TensorSpec


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


def sample_weights_backward_flops(grad: Spec, weight: Spec, indices: Spec, *_: Any, out: Any = None,
                                  **__: Any) -> FlopCount:
    """The dot product of a row and its bag's gradient, for each index."""
    return multiply_adds(indices.numel * weight[-1])


def embedding_renorm_flops(weight: Spec, indices: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """Norm (2) and scale (1) of each row addressed, taken as distinct and all over the limit."""
    return 3 * indices.numel * weight[-1]


register_each("_embedding_bag _embedding_bag_forward_only embedding_bag", embedding_bag_flops)
register_each("_embedding_bag_backward", embedding_bag_backward_flops)
register_each("_embedding_bag_dense_backward", embedding_bag_dense_backward_flops)
register_each("_embedding_bag_per_sample_weights_backward", sample_weights_backward_flops)
register_each("embedding_renorm", embedding_renorm_flops)
