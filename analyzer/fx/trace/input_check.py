"""Whether arguments are like those that a graph was traced with."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from analyzer.errors import InputError
from analyzer.meta.plain_type import LITERALS
from analyzer.meta.structure import Access, tensor_paths

Tensor = torch.Tensor
_SIMPLE = (*LITERALS, torch.dtype, torch.device)


class Expected(NamedTuple):
    """One tensor, or one constant, that the graph was traced with; ``path`` leads to it inside the argument. The tensor
    at ``first``, of an earlier argument or place, was the same object.
    """

    argument: str
    path: tuple[Access, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    constant: Any = None
    first: Expected | None = None

    def __str__(self) -> str:
        return self.argument + "".join(map(str, self.path))

    def check(self, value: Any) -> None:
        """Raise InputError where ``value``, the whole argument, has something else at this place."""
        try:
            value = self._find(value)
        except (AttributeError, KeyError, IndexError, TypeError):
            raise InputError(f"{self}: missing; the graph was traced with {self.describe()} there") from None
        if isinstance(value, fx.Proxy):
            return
        if self.shape is None:
            if isinstance(value, Tensor) or isinstance(value, _SIMPLE) and (type(value) is not type(self.constant)
                                                                            or value != self.constant):
                raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with the constant "
                                 f"{self.constant!r}; trace again with the value that you want")
        elif not isinstance(value, Tensor):
            raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with {self.describe()}")
        elif tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with {self.describe()}; shapes "
                             "and dtypes are constants of a traced graph: trace again with a tensor like this one in "
                             "meta_args")

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise InputError where the tensor that it was the same object as is another one in ``values``."""
        if self.first is None or self.first.argument not in values:
            return
        mine, other = self._find(values[self.argument]), self.first._find(values[self.first.argument])
        if mine is not other and not isinstance(mine, fx.Proxy) and not isinstance(other, fx.Proxy):
            raise InputError(f"{self} and {self.first}: two tensors, but the graph was traced with one tensor in both "
                             "places, and code that asks whether they are the same, or writes to one, did what it does "
                             "for one: trace again with two tensors in meta_args")

    def _find(self, value: Any) -> Any:
        for access in self.path:
            value = access.get(value)
        return value

    def describe(self) -> str:
        """What was traced, in words."""
        if self.shape is None:
            return f"the constant {self.constant!r}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def expectations(arguments: Iterable[tuple[str, Any]]) -> list[Expected]:
    """What the arguments of the traced forward were, by their names in the graph."""
    found: list[Expected] = []
    first: dict[int, Expected] = {}  # by id of the tensor, where it was met first

    for argument, value in arguments:
        for path, tensor in tensor_paths(value):
            expected = Expected(argument, path, tuple(tensor.shape), tensor.dtype, first=first.get(id(tensor)))
            first.setdefault(id(tensor), expected)
            found.append(expected)
        if isinstance(value, _SIMPLE):
            found.append(Expected(argument, (), None, None, value))
    return found
