"""What modules are like when a forward begins: one that a call finds otherwise is not one node of the graph.

A graph calls a module as the module is when the graph runs. What forward itself sets on it (flags, settings, other
parameters, hooks, another forward) is not in the graph, so such a call is traced into, with all of that in force.
"""
from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from analyzer.errors import InputError
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.spec import VALUES
from analyzer.meta.state import MetaState

_State = dict[str, tuple[Any, tuple[Any, ...]]]
"""Attributes by name, each with what it holds where it is a container."""
_MISSING: tuple[Any, tuple[Any, ...]] = None, ()
_CONTAINERS = (dict, list, set)
_TOLD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # by `Assignments`, as the next
_TOLD_KINDS = torch.Tensor, nn.Module, torch._C.Generator
_CLASS = "class"  # no attribute has the name of a keyword


class ModuleStates:
    """Attributes, parameters, hooks and flags of modules, as the graph will find them when it calls the modules."""

    def __init__(self, borrowed: Borrowed) -> None:
        self.borrowed = borrowed
        self._found = {id(module): (module, _read(module)) for module in borrowed.every}
        self._unknown: list[nn.Module] = []  # such as those of a closure
        self._shared = _read_shared()

    def are_as_found(self, modules: Iterable[nn.Module]) -> bool:
        """Whether modules are as the graph will find them; one that was not there when forward began is."""
        for module in modules:
            if id(module) not in self._found:
                self._unknown.append(module)
                self._found[id(module)] = module, _read(module)
            elif not _are_same(self._found[id(module)][1], _read(module)):
                return False
        return _are_same(self._shared, _read_shared())

    def note_run(self, modules: Iterable[nn.Module]) -> None:
        """Code of ``modules`` ran as one node: what it set on them, it sets where the graph runs, too."""
        for m in modules:
            self._found[id(m)] = m, _read(m)

    def tell(self, state: MetaState) -> None:
        """Note what forward leaves otherwise than it found it, but for tensors and modules. Raises InputError where the
        graph would run a module that is none of the root's in another state than the one traced.
        """
        for module in self._unknown:
            if not _are_same(self._found[id(module)][1], _read(module)):
                raise InputError(f"forward runs a {type(module).__name__} that is no submodule of the traced module "
                                 "and changes it afterwards, so that the graph would run it as changed. Make it a "
                                 "submodule")
        others: dict[str, list[str]] = {}  # by name, of what cannot be told in full: the paths of modules that have it
        for module, before in self._found.values():
            now, path = _read(module), self.borrowed.modules.get(id(module))
            for name in () if path is None else {**before, **now}:
                one, other = entries = before.get(name, _MISSING), now.get(name, _MISSING)
                if _is_same(one, other) or type(module).__module__.startswith("torch.") and name.startswith(
                        "_") and not name.endswith("_hooks"):  # DistributedDataParallel's own state
                    continue
                if all(isinstance(value, (*VALUES, *_CONTAINERS)) and all(isinstance(item, VALUES) for item in items)
                       for value, items in entries):
                    found, left = (items if isinstance(value, _CONTAINERS) else value for value, items in entries)
                    state.assume(f"forward leaves {f'{path}.{name}'.lstrip('.')} as {left!r:.60} where it "
                                 f"finds {found!r:.60}: the graph does not set it, and does what a call does that "
                                 "finds the latter")
                elif name not in _TOLD and not any(isinstance(v, _TOLD_KINDS) for v in (one[0], other[0])):
                    others.setdefault(name, []).append(path or "the model")
        for name, paths in others.items():
            more = f" and {len(paths) - 1} others" * (len(paths) > 1)
            state.assume(f"forward changes {name} of {paths[0]}{more}: the graph does not")


def _read(module: nn.Module) -> _State:
    if isinstance(module, torch.jit.ScriptModule):  # whose attributes C++ holds
        return {"training": (module.training, ())}
    state = {name: (value, _items(value)) for name, value in vars(module).items()}
    state[_CLASS] = type(module), (type(module).forward,)
    return state


def _read_shared() -> _State:
    """The hooks on all modules, and whether parametrizations keep what they compute."""
    return {**{name: (value, _items(value)) for name, value in vars(torch_module).items()
               if name.startswith("_global_")}, "parametrize": (parametrize._cache_enabled, ())}


def _items(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, _CONTAINERS) or not value:
        return ()
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _are_same(one: _State, other: _State) -> bool:
    return one.keys() == other.keys() and all(map(_is_same, one.values(), map(other.__getitem__, one)))


def _is_same(one: tuple[Any, tuple[Any, ...]], other: tuple[Any, tuple[Any, ...]]) -> bool:
    (value, items), (now, items_now) = one, other
    if value is not now and not (type(value) is type(now) and isinstance(value, VALUES) and value == now):
        return False
    return len(items) == len(items_now) and all(map(operator.is_, items, items_now))

