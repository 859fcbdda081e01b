"""Whether arguments are like those that a graph was traced with."""
from __future__ import annotations

import enum
import types
from collections import UserDict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from analyzer.errors import InputError
from analyzer.meta.plain_type import VALUES
from analyzer.meta.structure import Access, children

Tensor = torch.Tensor
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


class Expected(NamedTuple):
    """One tensor, one constant, or the ``keys`` of one container, that the graph was traced with; ``path`` leads to it
    inside the argument. Places with one ``tensor``, a number, held the same object.
    """

    argument: str
    path: tuple[Access, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    constant: Any = None
    keys: tuple[Any, ...] | None = None
    tensor: int = 0

    def __str__(self) -> str:
        return self.argument + "".join(map(str, self.path))

    def check(self, value: Any, by_name: bool) -> None:
        """Raise InputError where ``value``, the whole argument, has something else at this place. Constants among named
        arguments (``by_name``) may be left out, as others that have a default.
        """
        try:
            value = self.find(value)
        except (AttributeError, KeyError, IndexError, TypeError):
            if by_name and len(self.path) == 1 and self.shape is None:
                return
            raise InputError(f"{self}: missing; the graph was traced with {self.describe()} there") from None
        if isinstance(value, fx.Proxy):
            return
        if self.keys is not None:
            self._check_keys(_keys(value))
        elif self.shape is None:
            found = [c for c in _comparable(value) if type(c) is type(self.constant)]
            if not found or found[0] != self.constant and repr(found[0]) != repr(self.constant):  # as NaN is
                raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with {self.describe()}; "
                                 "trace again with the value that you want")
        elif not isinstance(value, Tensor):
            raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with {self.describe()}")
        elif tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise InputError(f"{self}: got {_describe(value)}, but the graph was traced with {self.describe()}; shapes "
                             "and dtypes are constants of a traced graph: trace again with a tensor like this one in "
                             "meta_args")

    def _check_keys(self, keys: tuple[Any, ...] | None) -> None:
        assert self.keys is not None
        if keys is None or all(type(k) is int for k in keys) and len(keys) > len(self.keys):
            got = "no container" if keys is None else f"{len(keys)} items"
            raise InputError(f"{self}: got {got}, but the graph was traced with {len(self.keys)}")
        if extra := [str(k) for k in keys if k not in self.keys]:
            raise InputError(f"{', '.join(extra)}: not given when the graph was traced; put it into meta_args, or a "
                             "constant into concrete_args")

    def find(self, value: Any) -> Any:
        """What is at this place in ``value``, the whole argument."""
        for access in self.path:
            value = access.get(value)
        return value

    def describe(self) -> str:
        """What was traced, in words."""
        if self.keys is not None:
            return f"{len(self.keys)} items"
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
    numbers: dict[int, int] = {}  # by id of a tensor
    seen: set[int] = set()

    def walk(argument: str, value: Any, path: tuple[Access, ...]) -> None:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(numbers))
            found.append(Expected(argument, path, tuple(value.shape), value.dtype, tensor=number))
        elif constant := _comparable(value):
            found.append(Expected(argument, path, None, None, *constant))
        elif id(value) not in seen:
            seen.add(id(value))
            if (keys := _keys(value)) is not None:
                found.append(Expected(argument, path, None, None, keys=keys))
            for access, child in children(value):
                walk(argument, child, (*path, access))

    for argument, value in arguments:
        walk(argument, value, ())
    return found


def _keys(value: Any) -> tuple[Any, ...] | None:
    """What items of a container are found by; None for others."""
    if isinstance(value, (dict, UserDict)):
        return tuple(value)
    return tuple(range(len(value))) if isinstance(value, (list, tuple, deque)) else None


def _comparable(value: Any) -> list[Any]:
    """What tells a constant from others, and can be copied and pickled; empty where only its parts do, if any."""
    if isinstance(value, _FUNCTIONS):
        return [f"{value.__module__}.{value.__qualname__}"]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return [value.tolist()]
    return [value] if isinstance(value, (*VALUES, slice, range, enum.Enum)) else []
