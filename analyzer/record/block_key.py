"""When two blocks are the same: the same code, the same specs, and the same values of whatever their forward pass read."""
from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_VALUES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
_MODULE_FILE = sys.modules[nn.Module.__module__].__file__


def structure_key(module: nn.Module, memo: dict[int, int | None], numbers: dict[Hashable, int]) -> int | None:
    """A number for the class, training flag, parameters and buffers of a module and of all below it, the same for the same.

    None where a hook or script makes it one of a kind. ``memo`` is by id(module), ``numbers`` by what the number stands for.
    """
    if id(module) in memo:
        return memo[id(module)]
    memo[id(module)] = None  # a module that holds itself is one of a kind
    children = []
    for name, child in module._modules.items():
        key = None if child is None else structure_key(child, memo, numbers)
        if child is not None and key is None:
            return None
        children.append((name, key))
    if isinstance(module, torch.jit.ScriptModule) or any(getattr(module, name, None) for name in _HOOKS):
        return None
    tensors: list[Any] = []
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is None:
                tensors.append((name, None))
            elif tensor.layout is not torch.strided or tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                return None
            else:
                tensors.append((name, (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)))
    found = memo[id(module)] = numbers.setdefault((type(module), module.training, tuple(children), tuple(tensors)), len(numbers))
    return found


@contextmanager
def watch_reads(root: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Collect (path, attribute) of every attribute that code reads from the modules below ``root``; "*" where it read a whole ``__dict__``."""
    paths = {id(m): path for path, m in root.named_modules()}
    reads: set[tuple[str, str]] = set()
    patched: list[tuple[type, Any]] = []

    def patch(cls: type) -> None:
        original = cls.__getattribute__

        def __getattribute__(self: Any, name: str) -> Any:
            path = paths.get(id(self))
            if path is not None:
                if name == "__dict__":
                    if sys._getframe(1).f_code.co_filename != _MODULE_FILE:
                        reads.add((path, "*"))
                else:
                    reads.add((path, name))
            return original(self, name)  # type: ignore[call-arg]

        patched.append((cls, cls.__dict__.get("__getattribute__")))
        cls.__getattribute__ = __getattribute__  # type: ignore[method-assign,assignment]

    try:
        for cls in {type(m) for m in root.modules()}:
            patch(cls)
        yield reads
    finally:
        for cls, before in reversed(patched):
            if before is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = before


class ReadValues:
    """The values that a block's forward pass read, to compare with another block's."""

    def __init__(self, root: nn.Module, reads: set[tuple[str, str]]) -> None:
        self.root = root
        self.positions = positions(root)
        modules = dict(root.named_modules())
        index_of = {path: i for i, path in enumerate(modules)}
        self.count = len(modules)
        self.values: list[tuple[int, str, Any]] = []   # place of a module, name of an attribute of its own, its value
        self.fixed: list[tuple[int, str]] = []         # what its class gives, unless an attribute hides it
        self.computed: list[tuple[int, str, Any]] = []
        for path, name in sorted(reads):
            module, i = modules[path], index_of[path]
            for n in list(module.__dict__) if name == "*" else [name]:
                if n in _REGISTERED or n in module._parameters or n in module._buffers or n in module._modules:
                    continue  # the same by structure
                if n in module.__dict__:
                    self.values.append((i, n, module.__dict__[n]))
                elif isinstance(inspect.getattr_static(type(module), n, None), (types.FunctionType, staticmethod, classmethod)):
                    self.fixed.append((i, n))
                else:
                    self.computed.append((i, n, getattr(module, n, _MISSING)))

    def hold_for(self, other: nn.Module, its: Sequence[nn.Module]) -> bool:
        """Whether ``other``, of the same structure, would have given the same values; ``its`` are the modules in it, itself first."""
        if other is self.root:
            return True
        if len(its) != self.count:
            return False  # one of them holds a module twice
        contents = [m.__dict__ for m in its]
        for i, name in self.fixed:
            if name in contents[i]:
                return False
        where: dict[int, str] | None = None
        for i, name, mine in self.values:
            theirs = contents[i].get(name, _MISSING)
            if mine is theirs or type(mine) is type(theirs) and (
                    mine == theirs if isinstance(mine, _VALUES) else type(mine) in _CONTAINERS and not mine and not theirs):
                continue
            where = where or positions(other)
            if not _same(mine, theirs, self.positions, where):
                return False
        for i, name, mine in self.computed:
            theirs = getattr(its[i], name, _MISSING)
            where = where or positions(other)
            if not _same(mine, theirs, self.positions, where):
                return False
        return True


_MISSING = object()
_REGISTERED = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, OrderedDict, list, tuple, set)


def positions(root: nn.Module) -> dict[int, str]:
    """Where each module, parameter and buffer stands below ``root``, by id."""
    found: dict[int, str] = {}
    for path, module in root.named_modules():
        found[id(module)] = path
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    found.setdefault(id(tensor), f"{path}.{name}")
            found[id(held)] = f"{path}.{'p' if held is module._parameters else 'b'}"
        found[id(module._modules)] = f"{path}.m"
    return found


def _same(a: Any, b: Any, where_a: dict[int, str], where_b: dict[int, str]) -> bool:
    if a is b:
        return True
    if id(a) in where_a:
        return where_a[id(a)] == where_b.get(id(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, _VALUES):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, where_a, where_b) for x, y in zip(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], where_a, where_b) for k in a)
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same(a.__self__, b.__self__, where_a, where_b)
    if isinstance(a, functools.partial):
        return (a.func is b.func and _same(a.args, b.args, where_a, where_b) and _same(a.keywords, b.keywords, where_a, where_b))
    return False  # objects of their own: nobody knows what they would have answered
