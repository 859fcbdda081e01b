"""Functions and modules of the model that become one node because what they do depends on data.

Where Python code asks for a size or a value that only data could give, the graph cannot hold the answer. The smallest
function or module around that code whose results can be told from outside becomes a node that runs it, so that results
and gradients are the original's whatever the data is.
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

from analyzer.errors import InputError
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.source_line import is_user_code
from analyzer.meta.structure import children, holds_tensor, is_plain_object, thaw

from .function_call import CallTarget, HeldModule

_TRACER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracer.py")
_FUNCTIONAL = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn", "functional.py")


class Site(NamedTuple):
    """What can be one node: a module, a class of modules made anew (no ``name``), or a function that ``owner`` has."""

    owner: Any
    name: str = ""

    def __str__(self) -> str:
        if not self.name:
            return f"the module {(self.owner if isinstance(self.owner, type) else type(self.owner)).__name__}"
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}()"


class CallMethod(CallTarget):
    """Calls the function ``wrapped``, a method of a module, with the module or the `HeldModule` around it."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(module.module if isinstance(module, HeldModule) else module, *args, **kwargs)


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's call, hooks and all (while tracing, `nn.Module.__call__` itself is another one)."""
    return module(*args, **kwargs)


class GiveArguments(CallTarget):
    """Calls ``wrapped``; gives its result and its arguments, where it put other tensors into them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = thaw(args), thaw(kwargs)
        return self.wrapped(*args, **kwargs), args, kwargs


def module_site(module: nn.Module, borrowed: Borrowed) -> Site | None:
    """What names ``module`` in the next run of the forward too; None for one with tensors that each run makes anew."""
    if id(module) in borrowed.modules:
        return Site(module)
    tensors = [*module.parameters(), *module.buffers(), *_attributes(module)]
    if not tensors:
        return Site(type(module))
    return Site(module) if all(borrowed.original_of(t) is not None for t in tensors) else None


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    return [t for m in module.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]


def open_sites(borrowed: Borrowed) -> list[Site]:
    """The functions and modules that run now, innermost first, up to the forward of the root, which is none."""
    found: list[Site] = []
    root, end = borrowed.root, code_of(borrowed.root.forward)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code is end and (first is root or not inspect.ismethod(root.forward)):
            return found
        if (is_user_code(code.co_filename) or code.co_filename
                == _FUNCTIONAL) and not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
            site = _site(frame, code, first, borrowed)
            if site is not None:
                found.append(site)
        frame = frame.f_back
    return found


def _site(frame: FrameType, code: CodeType, first: Any, borrowed: Borrowed) -> Site | None:
    if isinstance(first, nn.Module) and code_of(type(first).forward) is code:
        return module_site(first, borrowed)
    if first is not None and (isinstance(first, nn.Module) or is_plain_object(first)):
        for kind in type(first).__mro__:
            held = vars(kind).get(code.co_name)
            if "<locals>" in kind.__qualname__ and id(first) not in borrowed.modules:
                continue  # a class that forward may make anew, too
            if isinstance(held, FunctionType) and code_of(held) is code:
                return Site(kind, code.co_name)
    held = frame.f_globals.get(code.co_name)
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    if module is not None and isinstance(held, FunctionType) and code_of(held) is code and vars(module).get(
            code.co_name) is held:
        return Site(module, code.co_name)
    return None


def code_of(function: Any) -> CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def outline_functions(sites: Iterable[Site], run: Callable[[Site, Any, tuple[Any, ...], dict[str, Any]],
                                                           Any]) -> Iterator[Undo]:
    """Let calls go through ``run`` wherever a class, a Python module or a dict of its package holds them; the undos."""
    for site in sites:
        if not site.name:
            continue
        function = vars(site.owner)[site.name]

        def make(original: Any, site: Site = site) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return run(site, original, args, kwargs)

            return call

        for owner in [site.owner] if isinstance(site.owner, type) else list(sys.modules.values()):
            names = getattr(owner, "__dict__", None)
            near = names and str(names.get("__name__")).partition(".")[0] == function.__module__.partition(".")[0]
            for name, value in list(names.items()) if names else ():
                if value is function:
                    yield replace(owner, name, make)
                elif near and type(value) is dict and name != "__builtins__":
                    for key in [k for k, v in value.items() if v is function]:
                        value[key] = make(function)
                        yield functools.partial(value.__setitem__, key, function)


def expected_structure(value: Any) -> Any:
    """How many items the lists and dicts of a result have, all the way down: what `keep_structure` checks."""
    if isinstance(value, (list, tuple)) and holds_tensor(value):
        return [expected_structure(v) for v in value]
    if isinstance(value, dict) and holds_tensor(value):
        return {k: expected_structure(v) for k, v in value.items()}
    return None


def keep_structure(value: Any, expected: Any) -> Any:
    """``value``. Raises InputError where it has another number of items than was traced, which later nodes expect."""
    if isinstance(expected, list):
        if len(value) != len(expected):
            raise InputError(f"the graph was traced with {len(expected)} items where this data gives {len(value)}: "
                             "what takes them one by one must be in the function or module that makes them")
        for v, e in zip(value, expected):
            keep_structure(v, e)
    elif isinstance(expected, dict):
        if value.keys() != expected.keys():
            raise InputError(f"the graph was traced with the keys {list(expected)} where this data gives {list(value)}")
        for k, e in expected.items():
            keep_structure(value[k], e)
    return value


def numbers_of(value: Any) -> list[tuple[tuple[tuple[Any, bool], ...], Any]]:
    """The numbers, strings and sizes in a result, each with the steps that lead to it: (key, whether an attribute)."""
    found: list[tuple[tuple[tuple[Any, bool], ...], Any]] = []
    seen: set[int] = set()

    def walk(value: Any, path: tuple[tuple[Any, bool], ...]) -> None:
        if isinstance(value, (bool, int, float, complex, str, torch.Size)):
            found.append((path, tuple(value) if isinstance(value, torch.Size) else value))
        elif id(value) not in seen:
            seen.add(id(value))
            for access, child in children(value):
                walk(child, (*path, (access.key, access.attribute)))

    walk(value, ())
    return found


def keep_numbers(value: Any, numbers: list[tuple[tuple[tuple[Any, bool], ...], Any]], place: str) -> Any:
    """``value``. Raises InputError where it holds other ``numbers`` (of `numbers_of`), which forward itself uses."""
    for path, traced in numbers:
        found = value
        for key, is_attribute in path:
            found = getattr(found, key) if is_attribute else found[key]
        if found != traced:
            raise InputError(f"{place} gave {found!r:.60}, which depends on data; the traced forward itself uses it "
                             f"and was traced with {traced!r:.60}. Put the code that uses it into a submodule or a "
                             "function, which then becomes one node")
    return value


def keep_sizes(tensor: torch.Tensor, sizes: dict[int, int], place: str) -> torch.Tensor:
    """``tensor``. Raises InputError where it has other sizes, which the code at ``place`` made constants."""
    for d, size in sizes.items():
        if tensor.shape[d] != size:
            raise InputError(f"a tensor has {tensor.shape[d]} elements in dimension {d}, which depends on data; the "
                             f"code at {place} was traced with {size}. Put it into a submodule or a function, and give "
                             "meta_args without data: it then becomes one node; or trace again with this data")
    return tensor


def holds_made_anew(value: Any, borrowed: Borrowed) -> bool:
    """Whether a module among arguments is made anew, with tensors: the graph could only hold those of one run."""
    if isinstance(value, nn.Module):
        return module_site(value, borrowed) is None
    return any(isinstance(child, (nn.Module, tuple, list, dict)) and holds_made_anew(child, borrowed)
               for _, child in children(value))


def own_tensors(value: Any) -> list[int]:
    """Identities of the tensors in plain attributes of the modules among arguments, all the way down."""
    if isinstance(value, nn.Module):
        return [id(t) for t in _attributes(value)]
    return [i for _, child in children(value)
            if isinstance(child, (nn.Module, tuple, dict)) for i in own_tensors(child)]
