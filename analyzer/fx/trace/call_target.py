"""Targets of graph nodes that generated code could not name otherwise."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx.graph import _is_from_torch
from torch.fx.node import _get_qualified_name


class CallTarget:
    """A callable around ``wrapped``, equal to every other around the same, pickled by reference to it.

    torch.fx names a target in generated code by ``__module__`` and ``__name__``; names under ``torch`` would be taken
    for paths.
    """

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        scripted = isinstance(wrapped, torch.jit.ScriptFunction)
        self.__name__ = str(wrapped.name if scripted
                            else getattr(wrapped, "__name__", type(wrapped).__name__)).replace("<lambda>", "function")
        module = str(getattr(wrapped, "__module__", None) or "").replace("<", "_").replace(">", "_")
        self.__module__ = "function" if module.startswith("torch") or not module else module
        self.__qualname__ = self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        return self.wrapped(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return hash((type(self), id(self.wrapped)))

    def __reduce__(self) -> Any:
        name = qualified_name(self.wrapped)
        return (type(self), (self.wrapped,)) if name is None else (_rebuild, (type(self), name))

    def __deepcopy__(self, memo: Any) -> CallTarget:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


def _rebuild(kind: type[CallTarget], name: str) -> CallTarget:
    return kind(find_by_name(name))


class ApplyFunction(CallTarget):
    """``Function.apply`` of a custom `torch.autograd.Function`, the class of which is ``wrapped``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.wrapped.apply(*args, **kwargs)


class CallByName(CallTarget):
    """Calls what torch has under the name ``wrapped`` when it is called, which a mode may have replaced."""

    def __init__(self, wrapped: str) -> None:
        super().__init__(wrapped)
        self.__name__ = self.__qualname__ = wrapped.rpartition(".")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; nothing without CUDA, which there is while tracing, for a function of CUDA's."""
        if self.wrapped.startswith("torch.cuda.") and not torch.cuda.is_available():
            return None
        return find_by_name(self.wrapped)(*args, **kwargs)


class BuildContainer(CallTarget):
    """Makes a list or a mapping of the class ``wrapped`` from its items and its attributes, without its constructor."""

    def __call__(self, items: list[Any], attributes: dict[str, Any]) -> Any:
        """A container of these items, for a mapping pairs of key and value, and attributes."""
        new = self.wrapped.__new__(self.wrapped)
        if isinstance(new, list):
            list.extend(new, items)
        else:
            base: Any = OrderedDict if isinstance(new, OrderedDict) else dict
            for key, value in items:
                base.__setitem__(new, key, value)
        if attributes:
            vars(new).update(attributes)
        return new


class BuildObject(CallTarget):
    """Makes an object of the class ``wrapped`` from its attributes, without its constructor."""

    def __call__(self, **attributes: Any) -> Any:
        """An object of these attributes."""
        new = self.wrapped.__new__(self.wrapped)
        vars(new).update(attributes)
        return new


class HeldModule:
    """A module that a graph module holds without having it as a submodule: the root that it was traced from."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class BuildFunction(CallTarget):
    """Makes a function like ``wrapped`` around the values that it is given for the variables of its closure."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(_rebuild_function(wrapped, [CellType() for _ in wrapped.__closure__]))

    def __call__(self, *values: Any) -> Any:
        """The function around ``values``."""
        return _rebuild_function(self.wrapped, [CellType(v.module if isinstance(v, HeldModule) else v) for v in values])


def _rebuild_function(function: Any, cells: Iterable[CellType]) -> FunctionType:
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    new.__kwdefaults__ = function.__kwdefaults__
    return new


_nameable: dict[Any, bool] = {}


def name_target(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, or a `CallTarget` around it where generated code could not name it."""
    try:
        found = _nameable.get(func)
    except TypeError:  # not hashable
        return CallTarget(func)
    if found is None:
        found = _nameable[func] = _is_nameable(func)
    return func if found else CallTarget(func)


def _is_nameable(func: Callable[..., Any]) -> bool:
    if not hasattr(func, "__name__") or not hasattr(func, "__module__") or func.__name__ == "<lambda>":
        return False
    if _is_from_torch(func):
        return qualified_name(func) is not None
    try:
        return "<" not in _get_qualified_name(func)
    except RuntimeError:
        return False


def qualified_name(func: Any) -> str | None:
    """The name under which torch has a function; None for others."""
    if isinstance(func, CallTarget) or not hasattr(func, "__name__") or not _is_from_torch(func):
        return None
    try:
        name = _get_qualified_name(func)
    except RuntimeError:
        return None
    found = find_by_name(name)
    return name if found is func or found == func else None


def find_by_name(name: str) -> Any:
    """What torch has under a qualified name, or None."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found
