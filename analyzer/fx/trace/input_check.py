"""Whether arguments are like those that a graph was traced with."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from analyzer.errors import InputError
from analyzer.meta.plain_type import LITERALS

from .structure import Access, children, holds_tensor

Tensor = torch.Tensor
_SIMPLE = (*LITERALS, torch.dtype, torch.device)


class Expected(NamedTuple):
    """One tensor, or one constant, that the graph was traced with; ``path`` leads to it inside the argument."""

    argument: str
    path: tuple[Access, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    constant: Any = None

    def __str__(self) -> str:
        return self.argument + "".join(map(str, self.path))

    def check(self, value: Any) -> None:
        """Raise InputError where ``value``, the whole argument, has something else at this place."""
        try:
            for access in self.path:
                value = access.get(value)
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

    def describe(self) -> str:
        """What was traced, in words."""
        if self.shape is None:
            return f"the constant {self.constant!r}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def expectations(argument: str, value: Any) -> list[Expected]:
    """What an argument of the traced forward was."""
    if not holds_tensor(value):
        return [Expected(argument, (), None, None, value)] if isinstance(value, _SIMPLE) else []
    found: list[Expected] = []

    def walk(value: Any, path: tuple[Access, ...]) -> None:
        if isinstance(value, Tensor):
            found.append(Expected(argument, path, tuple(value.shape), value.dtype))
        elif holds_tensor(value):
            for access, child in children(value):
                walk(child, (*path, access))

    walk(value, ())
    return found
