"""The most elements that can be nonzero in unknown contents, as of zeros into which samplers write marks."""
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes

from .contents import covers_storage, storage_numel
from .known_value import Known, filled_with

Tensor = torch.Tensor


@dataclass(frozen=True)
class NonzeroBound:
    """So many elements at most: those that are nonzero in known contents, each so many times, and others."""

    more: int
    contents: tuple[tuple[Known, int], ...] = ()

    def times(self, factor: int) -> NonzeroBound:
        return NonzeroBound(self.more * factor, tuple((known, n * factor) for known, n in self.contents))

    def __add__(self, other: NonzeroBound) -> NonzeroBound:
        return NonzeroBound(self.more + other.more, self.contents + other.contents)

    def count(self) -> int:
        with without_modes():
            return self.more + sum(times * int(torch.count_nonzero(known.flat())) for known, times in self.contents)


def bound_of(tensor: Tensor) -> NonzeroBound | None:
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    if not isinstance(storage, MetaStorage):
        return None
    bound: NonzeroBound | None = storage.nonzero_bound
    if storage.exact is not None:
        value = filled_with(storage.exact)
        bound = NonzeroBound(0) if value == 0 else NonzeroBound(tensor.numel()) if value is not None else NonzeroBound(
            0, ((storage.exact, 1),))
    if bound is None:
        return None
    copies = prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride == 0)  # of an expanded one
    if tensor.numel() > copies * storage_numel(storage, tensor.dtype):
        return None  # windows that overlap
    return bound if copies == 1 else bound.times(copies)


# What bounds a result: parts to add up, each a number, or a tensor whose nonzero elements count, with what counts where
# these are not bounded, and how often each does. None: zeros become something else.
Part = Any
Rule = Callable[..., "list[Part] | None"]


def _both(*operands: Any) -> list[Part] | None:
    return [next((x for x in operands if isinstance(x, Tensor) and bound_of(x) is not None), operands[0])]


def _either(*operands: Any, alpha: Any = 1) -> list[Part] | None:
    return list(operands) if all(isinstance(x, Tensor) for x in operands) else None


def _compared(compare: Callable[[Any, Any], bool]) -> Rule:
    """Of a tensor with a number: nonzero where it is, if zero compares as false."""
    return lambda x, other: [x] if isinstance(other, (int, float)) and not compare(0, other) else None


def _value(value: Any, most: Part) -> list[Part]:
    if not isinstance(value, Tensor):
        return [most] if value else []
    known = bound_of(value)
    if known is not None and isinstance(most, int) and value.numel() == 1:
        return [known.times(most)]
    return [] if known == NonzeroBound(0) else [most]


def _fill_where(x: Tensor, mask: Tensor, value: Any) -> list[Part]:
    return [x, *_value(value, (mask, x.numel(), max(1, x.numel() // max(1, mask.numel()))))]


def _choose(condition: Tensor, x: Any, other: Any) -> list[Part] | None:
    if not isinstance(other, Tensor):
        return [condition] if other == 0 else None
    return [condition if bound_of(condition) is not None or not isinstance(x, Tensor) else x, other]


def _put(x: Tensor, indices: list[Any], value: Tensor, *_: Any, **__: Any) -> list[Part]:
    given = [i for i in indices if i is not None]
    masked = sum(i.dim() for i in given if i.dtype in (torch.bool, torch.uint8))
    rest = prod(size for d, size in enumerate(x.shape) if d >= len(indices) + masked or d < len(indices)
                and indices[d] is None)
    if len(given) == 1 and masked:
        rest = prod(x.shape) // max(1, given[0].numel())
        return [x, *_value(value, (given[0], x.numel(), rest))]
    if masked:
        return [x, x.numel()]
    return [x, *_value(value, prod(torch.broadcast_shapes(*(i.shape for i in given))) * rest)]


def _scatter(x: Tensor, dim: int, index: Tensor, value: Any, *_: Any, **__: Any) -> list[Part]:
    return [x, *_value(value, index.numel())]


def _rows(x: Tensor, dim: int, index: Tensor, value: Any, *_: Any, **__: Any) -> list[Part]:
    return [x, *_value(value, index.numel() * (x.numel() // max(1, x.shape[dim])) if x.dim() else 1)]


def _copy(x: Tensor, source: Any, *_: Any, **__: Any) -> list[Part]:
    storage = x.untyped_storage()
    kept: list[Part] = [] if isinstance(storage, MetaStorage) and covers_storage(x, storage) else [x]
    if not isinstance(source, Tensor):  # `x.copy_(1)`
        return [*kept, *_value(source, x.numel())]
    return [*kept, (source, x.numel(), x.numel() // max(1, source.numel()))]


_KEEPING = "_to_copy clone contiguous _reshape_copy flip roll abs neg sign repeat view_copy sort"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_KEEPING.split(), lambda x, *_, **__: [x]),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__", "mul"), _both),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__", "bitwise_xor", "__xor__", "logical_xor", "add", "sub",
                     "maximum"), _either),
    # what is written is a part of a storage, whose others stay
    **dict.fromkeys(("bitwise_and_", "logical_and_", "__iand__", "mul_"), lambda x, *_: [x]),
    "__ior__": _either, **dict.fromkeys(("cat", "stack"), lambda tensors, *_, **__: [(t, None, 1) for t in tensors]),
    **{name: _compared(getattr(operator, name)) for name in ("gt", "ge", "ne", "eq")},
    "masked_fill": _fill_where, "where": _choose,
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _put),
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    **dict.fromkeys(("index_fill", "index_copy", "index_add"), _rows), "copy": _copy,
    "fill": lambda x, value: [x, *_value(value, x.numel())], "zero": lambda x: [x],
}
BOUNDING = frozenset({*_RULES, *(f"{name}_" for name in _RULES if not name.endswith("_"))})
"""Operators that leave zeros as they are, but for so many."""


def bound_result(name: str, args: Any, kwargs: dict[str, Any], numel: int) -> NonzeroBound | None:
    """How many elements can be nonzero where an operator wrote ``numel``, those of the same storage included."""
    parts = (_RULES.get(name) or _RULES[name.removesuffix("_")])(*args, **kwargs)
    total = NonzeroBound(0)
    for part in [None] if parts is None else parts:
        if isinstance(part, Tensor):
            part = part, None, max(1, numel // max(1, part.numel()))  # it is broadcast
        if isinstance(part, tuple):
            tensor, otherwise, times = part
            bound = bound_of(tensor)
            part = otherwise if bound is None else bound.times(times)
        if part is None:
            return None
        total += NonzeroBound(part) if isinstance(part, int) else part
    return total
