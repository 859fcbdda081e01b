"""What formulas share: the tensors of a call, their elements, and multiply-adds by dtype."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from analyzer.meta.spec import TensorSpec

from .registration import FlopCount, Formula

# Of a recurrent cell, by cuDNN's mode (ATen's RNNDescriptor): 0 ReLU, 1 tanh, 2 LSTM, 3 GRU.
GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def multiply_adds(count: int, dtype_of: TensorSpec | None = None) -> FlopCount:
    """``count`` multiply-adds on elements of the dtype of ``dtype_of``: 2 FLOPs and 1 MAC each.

    A complex multiply-add is four real ones: (a+bi)(c+di) has 4 products, and as many sums once accumulated.

    >>> multiply_adds(10)
    FlopCount(flops=20, macs=10, executed_flops=None)
    """
    if dtype_of is not None and dtype_of.dtype.is_complex:
        count *= 4
    return FlopCount(2 * count, count)


def is_inexact(spec: TensorSpec) -> bool:
    """Whether arithmetic on the tensor is floating point."""
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def tensors(value: Any) -> Iterator[TensorSpec]:
    """Every tensor in a value: a spec, None, a number, or lists and dicts of them, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def first(value: Any) -> TensorSpec:
    """The first tensor of a result."""
    return next(tensors(value))


def components(spec: TensorSpec) -> int:
    """Real numbers in the tensor: 2 to a complex element."""
    return spec.numel * (2 if spec.dtype.is_complex else 1)


def per_input(flops: int, position: int = 0) -> Formula:
    """The formula of ``flops`` for each real number of the tensor argument at ``position``."""
    return lambda *args, **__: flops * components(args[position])


def per_output(flops: int) -> Formula:
    """The formula of ``flops`` operations for each output element."""
    return lambda *_, out, **__: flops * first(out).numel


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes broadcast to.

    >>> broadcast((7, 1), (5,)), broadcast((), (3, 1)), broadcast((1,), (0,))
    ((7, 5), (3, 1), (0,))
    """
    aligned = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in aligned)[::-1]


def indexed_elements(shape: Sequence[int], indices: Sequence[Any]) -> int | None:
    """Elements of a tensor that ``indices`` address, of which None stands for a whole dimension; unknown where a mask
    among them leaves that to data.
    """
    given = list(tensors(indices))
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return None
    untouched: int = prod(size for d, size in enumerate(shape) if d >= len(indices) or indices[d] is None)
    return prod(broadcast(*given)) * untouched


def spread(sizes: int | Iterable[int], dims: int) -> tuple[int, ...]:
    """One size per dimension, where a single one stands for all (kernel_size=3).

    >>> spread(3, 2), spread([3], 2), spread([3, 5], 2)
    ((3, 3), (3, 3), (3, 5))
    """
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * dims if len(given) == 1 else given
