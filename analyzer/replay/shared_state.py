"""State that the code of several modules may share and change: the objects that they hold, and what their functions
reach outside of them.
"""
from __future__ import annotations

import enum
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from analyzer.record.module_walk import REGISTRIES

_PLAIN = frozenset((int, float, bool, str, type(None)))
_CONTAINERS = (dict, list, set, deque, tuple)
_FIXED = (torch.Tensor, nn.Module, type, ModuleType, BuiltinFunctionType, enum.Enum)
_DEPTH = 4  # of containers and objects in each other; what is further in is known by its identity
_STATELESS = {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}

_Place = tuple[Any, str]
"""Where a value is found: in a dictionary, a class or a cell (which needs no name), under a name."""


class SharedState:
    """What ``modules`` hold besides tensors and modules, and the globals, closures, defaults and class attributes that
    the methods of their classes use.

    Functions that these call by name are looked at too, but not those of torch, numpy and Python's own modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        held = {
            id(v): v for m in modules for k, v in m.__dict__.items() if k not in REGISTRIES and not _is_constant(v)
        }.values()
        self._empty = [v for v in held if isinstance(v, _CONTAINERS) and not v]
        self._held = [v for v in held if (not isinstance(v, _CONTAINERS) or v) and _may_change(v)]
        self._places = [place for place in _find_places(map(type, modules)) if _may_change(_look_up(place))]
        self._contents = self._read()

    def _read(self) -> list[Any]:
        return [_contents_of(v, _DEPTH) for v in (*self._held, *map(_look_up, self._places))]

    def is_same(self) -> bool:
        """Whether its contents are what they were; never where they cannot be told."""
        return not any(self._empty) and self._read() == self._contents


def _look_up(place: _Place) -> Any:
    holder, name = place
    if type(holder) is CellType:
        try:
            return holder.cell_contents
        except ValueError:  # not set yet
            return None
    return (holder if type(holder) is dict else vars(holder)).get(name)


def _find_places(classes: Iterable[type]) -> Iterator[_Place]:
    """Where the functions of these classes find what may change."""
    seen: set[Any] = set()
    pending: list[Any] = []

    def look_into(cls: type) -> Iterator[_Place]:
        if cls not in seen and not _is_stateless(cls):
            seen.add(cls)
            yield from ((cls, k) for k, v in vars(cls).items()
                        if not k.startswith("__") and (isinstance(v, _CONTAINERS) or type(v) in _PLAIN))

    def follow(namespace: dict[str, Any], names: set[str]) -> Iterator[_Place]:
        for name in names & namespace.keys():
            value = namespace[name]
            if isinstance(value, ModuleType):
                if not _is_stateless(value):
                    yield from follow(vars(value), names - {name})
            elif isinstance(value, type):
                yield from look_into(value)
            elif not name.startswith("__"):
                pending.append(value)
                yield namespace, name

    for cls in dict.fromkeys(base for cls in classes for base in cls.__mro__):
        if not _is_stateless(cls):
            yield from look_into(cls)
            pending += [v for k, v in vars(cls).items() if k != "__init__"]
    while pending:
        value = pending.pop()
        function = value.fget if isinstance(
            value, property) else value.func if isinstance(value, partial) else getattr(value, "__func__", value)
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and function not in seen and not _is_stateless(function):
            seen.add(function)
            cells = [(cell, "") for cell in function.__closure__ or ()]
            yield from cells
            yield from (({"": v}, "")
                        for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
                        if not _is_constant(v))
            pending += map(_look_up, cells)
            yield from follow(function.__globals__, _names_in(function.__code__))


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def _is_stateless(value: Any) -> bool:
    """Whether a class, function or module comes from where nothing is kept that shows in what a module does."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).partition(".")[0] in _STATELESS


def _is_constant(value: Any) -> bool:
    return type(value) in _PLAIN or type(value) is tuple and all(map(_is_constant, value))


def _may_change(value: Any) -> bool:
    """Whether more than its identity tells what it is."""
    return type(_contents_of(value, _DEPTH)) is not int


def _contents_of(value: Any, depth: int) -> Any:
    """What a change of a value changes; its identity where nothing does, another object each time where that cannot be
    told.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if not depth or isinstance(value, _FIXED):
        return id(value)
    if isinstance(value, _CONTAINERS):
        return _list_contents(value.items() if isinstance(value, dict) else enumerate(value), depth)
    if hasattr(kind, "tobytes"):  # arrays of numpy and others
        return value.tobytes()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, FunctionType):
        return _list_contents([(i, _look_up((cell, "")))
                               for i, cell in enumerate(value.__closure__)], depth) if value.__closure__ else id(value)
    if isinstance(value, MethodType):
        return _contents_of(value.__self__, depth)
    if isinstance(value, partial):
        return _list_contents([("", value.func), *enumerate(value.args), *value.keywords.items()], depth)
    if hasattr(kind, "__next__") or isinstance(value, torch.Generator):
        return object()
    if _is_stateless(kind) and kind is not SimpleNamespace:
        return id(value)
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [
        k for row in slots for k in ((row, ) if isinstance(row, str) else row) if k not in ("__dict__", "__weakref__")
    ]
    return _list_contents((*getattr(value, "__dict__", {}).items(), *((k, getattr(value, k, None)) for k in names)),
                          depth)


def _list_contents(items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
    return [(k if type(k) in _PLAIN else id(k), type(v), v if type(v) in _PLAIN else _contents_of(v, depth - 1))
            for k, v in items]
