"""What operators refuse for what their tensors hold, where that is known: indices beyond a dimension, labels beyond the
classes, weights that are none. On the CPU a kernel raises it; on CUDA it ends in an assertion on the device.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.tensor import device_of
from analyzer.meta.value.contents import look_at
from analyzer.registry import adding_to

from .index import BOOLEAN, check_written
from .rule import is_integral, wrap_dim

Tensor = torch.Tensor

value_rules: dict[str, Callable[..., None]] = {}
"""By the name of an ATen operator: ``check(*args, **kwargs)`` raises what its kernel raises."""
_checks = adding_to(value_rules)


def _first_outside(index: Tensor, size: int, least: int = 0, ignored: int | None = None) -> int | None:
    """The first known value that is not in [least, size), other than ``ignored``."""
    if index.dtype not in (torch.int32, torch.int64, torch.uint8):
        return None
    values = look_at(index)
    if values is None or not values.numel():
        return None
    with without_modes():
        low, high = (int(v) for v in values.aminmax())
        if least <= low and high < size:
            return None
        outside = values[(values < least) | (values >= size)]
        outside = outside if ignored is None else outside[outside != ignored]
        return int(outside[0]) if outside.numel() else None


@_checks("index", "_unsafe_index")
def index(self: Tensor, indices: Sequence[Tensor | None]) -> None:
    """aten/src/ATen/native/cpu/IndexKernelUtils.h, Indexer.get."""
    if any(i is not None and i.dtype in BOOLEAN for i in indices):
        return  # a mask takes several dimensions
    for dim, given in enumerate(indices):
        if given is not None:
            size = self.shape[dim]
            if (value := _first_outside(given, size, -size)) is not None:
                raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")


@_checks("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """The same; and aten/src/ATen/native/TensorAdvancedIndexing.cpp, make_index_put_iterator: of a mask count those
    that it selects.
    """
    index(self, indices)
    shapes: list[tuple[int, ...] | None] = []
    for i in indices:
        if i is None or i.dtype not in BOOLEAN:
            shapes.append(None if i is None else tuple(i.shape))
            continue
        known = look_at(i)
        if known is None:
            return
        with without_modes():
            count = int(torch.count_nonzero(known)) * (i.numel() // max(1, known.numel()))
        shapes += [(count,)] * i.dim()
    if any(i is not None and i.dtype in BOOLEAN and i.dim() for i in indices):
        check_written(tuple(self.shape), shapes, tuple(values.shape))


@_checks("remainder", "remainder_", "fmod", "fmod_", "floor_divide", "floor_divide_")
def divide_whole(self: Any, other: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, ZERO_DIVISION: of whole numbers on the CPU."""
    given = [x for x in (self, other) if isinstance(x, Tensor)]
    if isinstance(self, float) or isinstance(other, float) or not all([
            is_integral(t) and t.numel() and device_of(t).type == "cpu" for t in given]):
        return
    values = look_at(other) if isinstance(other, Tensor) else None
    with without_modes():
        if other == 0 if not isinstance(other, Tensor) else values is not None and not bool(values.all()):
            raise RuntimeError("ZeroDivisionError")


@_checks("div", "div_")
def divide(self: Any, other: Any, *, rounding_mode: str | None = None, **_kwargs: Any) -> None:
    """The same where the quotient is rounded."""
    if rounding_mode is not None:
        divide_whole(self, other)


@_checks("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter(self: Tensor, dim: int, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/ScatterGatherKernel.cpp."""
    dim = wrap_dim(dim, self.dim())
    _refuse_index(index, dim, self.shape[dim] if self.dim() else 1)


@_checks("index_add", "index_add_", "index_reduce", "index_reduce_")
def index_add(self: Tensor, dim: int, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_add_cpu_ and index_reduce_func_impl."""
    scatter(self, dim, index)


def _refuse_index(index: Tensor, dim: int, size: int) -> None:
    if (value := _first_outside(index, size)) is not None:
        raise RuntimeError(f"index {value} is out of bounds for dimension {dim} with size {size}")


@_checks("index_copy", "index_copy_")
def index_copy(self: Tensor, dim: int, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/IndexKernel.cpp, index_copy_kernel."""
    dim = wrap_dim(dim, self.dim())
    size = self.shape[dim] if self.dim() else 1
    if (value := _first_outside(index, size)) is not None:
        raise IndexError(f"index_copy_(): index {value} is out of bounds for dimension {dim} with size {size}")


@_checks("index_fill", "index_fill_")
def index_fill(self: Tensor, dim: int, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/IndexKernel.cpp, index_fill_kernel."""
    dim = wrap_dim(dim, self.dim())
    size = self.shape[dim] if self.dim() else 1
    if (value := _first_outside(index, size, -size)) is not None:
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")


@_checks("index_select")
def index_select(self: Tensor, dim: int, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_select_out_cpu_."""
    if self.dim() and _first_outside(index, self.shape[dim]) is not None:
        raise IndexError("index out of range in self")


@_checks("embedding")
def embedding(weight: Tensor, indices: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Embedding.cpp, which selects rows."""
    index_select(weight, 0, indices)


@_checks("embedding_renorm_")
def embedding_renorm(self: Tensor, indices: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Embedding.cpp, embedding_renorm_cpu_, before the rows are selected."""
    index_select(self, 0, indices)


@_checks("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/EmbeddingBag.cpp, check_arguments and index_select_add."""
    if (value := _first_outside(offsets, indices.shape[0] + 1)) is not None:
        raise RuntimeError(f"offsets[-1] can not be greater than input's length {indices.shape[0]} but got offsets[-1] "
                           f"of {value}")
    if (value := _first_outside(indices, weight.shape[0])) is not None:
        raise RuntimeError(f"embedding_bag: index {value} is not in the valid range [0, {weight.shape[0]})")


@_checks("take", "put", "put_")
def take(self: Tensor, index: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/IndexKernel.cpp, cpu_take_put_kernel."""
    if (value := _first_outside(index, self.numel(), -self.numel())) is not None:
        raise IndexError(f"out of range: tried to access index {value} on a tensor of {self.numel()} elements.")


@_checks("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
             **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossNLL.cpp, nll_loss_out_frame; LossNLL2d.cpp."""
    classes = self.shape[0] if self.dim() == 1 else self.shape[1]
    if (value := _first_outside(target, classes, ignored=ignore_index)) is not None:
        raise IndexError(f"Target {value} is out of bounds: there are {classes} classes.")


@_checks("binary_cross_entropy")
def binary_cross_entropy(self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Loss.cpp, binary_cross_entropy_out_cpu."""
    values = look_at(self)
    if values is not None:
        with without_modes():
            if not bool(((values >= 0) & (values <= 1)).all()):
                raise RuntimeError("all elements of input should be between 0 and 1")


@_checks("multi_margin_loss")
def multi_margin_loss(self: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossMultiMargin.cpp, target_index_checked."""
    if _first_outside(target, self.shape[-1] if self.dim() else 1) is not None:
        raise RuntimeError("target out of range")


@_checks("multilabel_margin_loss_forward")
def multilabel_margin_loss(self: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossMultiLabelMargin.cpp: -1 ends the labels."""
    if _first_outside(target, self.shape[-1] if self.dim() else 1, -1) is not None:
        raise RuntimeError("target out of range")


@_checks("masked_scatter", "masked_scatter_")
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/IndexKernel.cpp, cpu_masked_scatter_kernel."""
    values = look_at(mask)
    if values is not None and mask.numel() <= self.numel():
        with without_modes():
            count = int(torch.count_nonzero(values)) * (mask.numel() // max(1, values.numel()))
            if mask.shape != self.shape:  # which it is expanded to
                count *= self.numel() // max(1, mask.numel())
        if count > source.numel():
            raise RuntimeError("Number of elements of source < number of ones in mask: "
                               f"{source.numel()} and {count}")


@_checks("max_unpool2d", "max_unpool3d")
def max_unpool(self: Tensor, indices: Tensor, output_size: Sequence[int], *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/MaxUnpoolKernel.cpp."""
    if (value := _first_outside(indices, math.prod(output_size))) is not None:
        raise RuntimeError(f"Found an invalid max index: {value} (output volumes are of size "
                           f"{'x'.join(map(str, output_size))})")


@_checks("searchsorted")
def searchsorted(sorted_sequence: Tensor, *_args: Any, sorter: Tensor | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BucketizationUtils.h, searchsorted_pre_check."""
    if sorter is not None and sorter.dim() and _first_outside(sorter, sorter.shape[-1]) is not None:
        raise RuntimeError("torch.searchsorted(): sorter index out of range")


@_checks("segment_reduce")
def segment_reduce(data: Tensor, reduce: str, *, lengths: Tensor | None = None, axis: int = 0, unsafe: bool = False,
                   **_kwargs: Any) -> None:
    """aten/src/ATen/native/SegmentReduce.cpp, segment_reduce_kernel."""
    values = None if lengths is None or unsafe else look_at(lengths)
    if values is None or lengths is None or values.shape != lengths.shape or not values.numel():
        return
    with without_modes():
        if int(values.min()) < 0:
            raise RuntimeError("lengths contains negative value!")
        if not bool((values.sum(-1) == data.shape[axis]).all()):
            raise RuntimeError("segment_reduce(): Expected all rows of lengths along axis to sum to "
                               "data.size(lengths.dim()-1) when !unsafe.")


@_checks("multinomial")
def multinomial(self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/MultinomialKernel.cpp, multinomial_with_replacement_apply; Distributions.cpp."""
    values = look_at(self)
    if values is None or not values.numel():
        return
    with without_modes():
        if not bool(values.isfinite().all()) or bool((values < 0).any()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if values.dim() and values.shape == self.shape and bool((values.sum(-1) <= 0).any()):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
