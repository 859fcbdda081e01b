"""Functions and modules of the model that become one node because what they do depends on data.

Where Python code asks for a size or a value that only data could give, the graph cannot hold the answer. The smallest function or module
around that code whose results can be told from outside becomes a node that runs it, so that results and gradients are the original's
whatever the data is.
"""
from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from analyzer.errors import InputError
from analyzer.meta.patch import Undo, replace
from analyzer.meta.source_line import is_user_code

from .call_target import CallTarget
from .structure import children, holds_tensor, is_plain_object, tensors_of

_TRACER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracer.py")
_FUNCTIONAL = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn", "functional.py")


class Site(NamedTuple):
    """What can be one node: a module (``name`` empty), or the function that ``owner``, a class or a Python module, holds under ``name``."""

    owner: Any
    name: str = ""

    def __str__(self) -> str:
        if isinstance(self.owner, nn.Module):
            return f"the module {type(self.owner).__name__}"
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}()"


class HeldModule:
    """A module that a graph module holds without having it as a submodule: the root that it was traced from."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class CallMethod(CallTarget):
    """Calls the function ``wrapped``, a method of a module, with the module or the `HeldModule` around it."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(module.module if isinstance(module, HeldModule) else module, *args, **kwargs)


class GiveArguments(CallTarget):
    """Calls ``wrapped``; gives its result and its arguments, where it put other tensors into them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _thaw(args), _thaw(kwargs)
        return self.wrapped(*args, **kwargs), args, kwargs


def _thaw(value: Any) -> Any:
    """Containers that an interpreter of torch.fx passes, which refuse to be changed, as Python's own."""
    if type(value) is tuple:
        return tuple(map(_thaw, value))
    if isinstance(value, immutable_list):
        return list(map(_thaw, value))
    return {k: _thaw(v) for k, v in value.items()} if type(value) in (dict, immutable_dict) else value


def open_sites(root: nn.Module) -> list[Site]:
    """The functions and modules that run now, innermost first, up to the forward of ``root``, which is none."""
    found: list[Site] = []
    end = _code_of(root.forward)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code is end and (first is root or not inspect.ismethod(root.forward)):
            return found
        if (is_user_code(code.co_filename) or code.co_filename == _FUNCTIONAL) and not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
            site = _site(frame, code, first)
            if site is not None:
                found.append(site)
        frame = frame.f_back
    return found


def _site(frame: FrameType, code: CodeType, first: Any) -> Site | None:
    if isinstance(first, nn.Module) and _code_of(type(first).forward) is code:
        return Site(first)
    if first is not None and (isinstance(first, nn.Module) or is_plain_object(first)):
        for kind in type(first).__mro__:
            held = vars(kind).get(code.co_name)
            if isinstance(held, FunctionType) and _code_of(held) is code:
                return Site(kind, code.co_name)
    held = frame.f_globals.get(code.co_name)
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    if module is not None and isinstance(held, FunctionType) and _code_of(held) is code and vars(module).get(code.co_name) is held:
        return Site(module, code.co_name)
    return None


def _code_of(function: Any) -> CodeType | None:
    """The code behind decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def outline_functions(sites: Iterable[Site], run: Callable[[Site, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[Undo]:
    """Let calls of the functions go through ``run``, wherever a module or a class holds them under a name; each result undoes one step."""
    for site in sites:
        if isinstance(site.owner, nn.Module):
            continue
        function = vars(site.owner)[site.name]

        def make(original: Any, site: Site = site) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return run(site, original, args, kwargs)

            return call

        for owner in [site.owner] if isinstance(site.owner, type) else list(sys.modules.values()):
            names = getattr(owner, "__dict__", None)
            for name, value in list(names.items()) if names else ():
                if value is function:
                    yield replace(owner, name, make)


def expected_structure(value: Any) -> Any:
    """How many items the lists and dicts of a result have, all the way down: what `keep_structure` checks."""
    if isinstance(value, (list, tuple)) and holds_tensor(value):
        return [expected_structure(v) for v in value]
    if isinstance(value, dict) and holds_tensor(value):
        return {k: expected_structure(v) for k, v in value.items()}
    return None


def keep_structure(value: Any, expected: Any) -> Any:
    """``value``, which has as many items as when it was traced.

    Raises InputError where data gave another number: the nodes behind are for the number traced.
    """
    if isinstance(expected, list):
        if len(value) != len(expected):
            raise InputError(f"the graph was traced with {len(expected)} items where this data gives {len(value)}: what takes them one by one "
                             f"must be in the function or module that makes them")
        for v, e in zip(value, expected):
            keep_structure(v, e)
    elif isinstance(expected, dict):
        if value.keys() != expected.keys():
            raise InputError(f"the graph was traced with the keys {list(expected)} where this data gives {list(value)}")
        for k, e in expected.items():
            keep_structure(value[k], e)
    return value


def keep_sizes(tensor: torch.Tensor, sizes: dict[int, int], place: str) -> torch.Tensor:
    """``tensor``, whose sizes are those that the graph was traced with.

    Raises InputError where data gave others, which the code at ``place`` made constants of the graph.
    """
    for d, size in sizes.items():
        if tensor.shape[d] != size:
            raise InputError(f"a tensor has {tensor.shape[d]} elements in dimension {d}, which depends on data; the code at {place} was traced "
                             f"with {size} and is part of the traced forward itself. Put it into a submodule or a function, which then becomes one node")
    return tensor


def held_tensors(value: Any) -> list[int]:
    """Identities of the tensors in nested arguments."""
    return [id(t) for t in tensors_of(value)]


def own_tensors(value: Any) -> list[int]:
    """Identities of the tensors in plain attributes of the modules among arguments, all the way down."""
    if isinstance(value, nn.Module):
        return [id(t) for module in value.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
    return [i for _, child in children(value) if isinstance(child, (nn.Module, tuple, dict)) for i in own_tensors(child)]
