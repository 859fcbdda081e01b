"""Where FLOP formulas are registered, and sizes that they share."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any, TypeAlias

import torch

from analyzer.meta.spec import TensorSpec
from analyzer.profilers.operator_registry import OperatorRegistry
from analyzer.registry import Call

from . import FAMILIES

# What a formula returns, and the table it is registered in.

@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one call; counts add.

    ``flops`` takes masks as dense; ``executed_flops`` leaves out what a causal or sliding-window mask hides
    (None: the same as ``flops``). ``macs`` are the multiply-adds of multiply-accumulate operators, each 2 of the FLOPs.

    >>> FlopCount(8, 4) + FlopCount(10, 5, executed_flops=6)
    FlopCount(flops=18, macs=9, executed_flops=14)
    """

    flops: int
    macs: int = 0
    executed_flops: int | None = None

    def __add__(self, other: FlopCount) -> FlopCount:
        executed = None
        if self.executed_flops is not None or other.executed_flops is not None:
            executed = self.executed + other.executed
        return FlopCount(self.flops + other.flops, self.macs + other.macs, executed)

    def times(self, number: int) -> FlopCount:
        """That of so many calls.

        >>> FlopCount(8, 4).times(3)
        FlopCount(flops=24, macs=12, executed_flops=None)
        """
        return FlopCount(number * self.flops, number * self.macs,
                         None if self.executed_flops is None else number * self.executed_flops)

    @property
    def executed(self) -> int:
        """``executed_flops``, or ``flops`` where they are the same."""
        return self.flops if self.executed_flops is None else self.executed_flops


Formula: TypeAlias = Callable[..., int | FlopCount | None]  # None: this call's count depends on data


register_flop_impl: OperatorRegistry[Formula] = OperatorRegistry(
    "register_flop_impl", __package__, FAMILIES, Call("f(*args, out=..., **kwargs)", keywords=("out",)))
"""Register the FLOPs of an operator: a function of the call's own arguments, each tensor a `TensorSpec`, and ``out``.

It returns FLOPs, a `FlopCount`, or None where data decides. The key is a ``torch.ops`` operator (one overload or all),
its name, what ``@torch.library.custom_op`` made, a Triton kernel, or a Python function with a registered shape. Raises
InputError for another key, and a profile does for another result. An operator without a formula stands in
`Profile.uncounted`, never as zero."""


def register_each(names: str, formula: Formula) -> None:
    """Register ``formula`` for every ATen operator of a list separated by blanks."""
    for name in names.split():
        register_flop_impl(f"aten::{name}", formula)


# What formulas share: the tensors of a call, their elements, and multiply-adds by dtype.

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
