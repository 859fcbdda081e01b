"""Hooks on a user's parameters run on the fake tensors: so does what they reach, an optimizer above all."""
from __future__ import annotations

import copy
import dis
import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import nn

from analyzer.meta.plain_type import LEAVES
from analyzer.meta.state import CPU
from analyzer.record.module_walk import REGISTRIES
from analyzer.record.optimizer_step import has_gradient_hooks, is_updated_in_backward, share_gradient_hooks

from .fake_tensor import FakeTensors

_PLAIN = LEAVES - {types.FunctionType, types.MethodType, functools.partial}
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, set, deque)
_DEEPEST = 2  # objects in objects that a hook reaches, functions that functions call; not the whole heap behind them


class GradientHooks:
    """Gives the hooks of parameters to their fake tensors; ``undo`` gets what puts everything back in reverse order.

    What a hook reaches by its closure, defaults, globals or object is replaced: parameters by their fake tensors,
    containers by copies, also where parameters are keys, and the attributes of optimizers and plain objects for a
    while. Modules' own parameters, buffers and children are fake already.
    """

    def __init__(self, fakes: FakeTensors, undo: list[Any]) -> None:
        self.fakes, self.undo = fakes, undo
        self._on_host = FakeTensors(fakes.state, CPU)    # an optimizer's counters
        self._replaced: dict[int, tuple[Any, Any]] = {}  # by id: the original, and what takes its place
        self._in_optimizer = False

    def take(self) -> None:
        """Give them to the fake tensors."""
        hooked = [(original, fake) for original, fake in self.fakes if has_gradient_hooks(original)]
        self.undo.append(self._on_host.let_go)
        if any(is_updated_in_backward(original) for original, _ in self.fakes):
            self.fakes.state.assume("hooks on the autograd nodes of parameters are not run: gradients, and the "
                                    "optimizers that they step in the backward pass, are counted as if there were none")
        for original, fake in hooked:
            for hooks in share_gradient_hooks(original, fake):
                if id(hooks) not in self._replaced:
                    self._replaced[id(hooks)] = hooks, hooks
                    self.undo.append(functools.partial(_set_contents, hooks, dict(hooks)))
                    hooks.update([(key, self._replace(hook, 0)) for key, hook in hooks.items()])

    def _replace(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (torch.jit.ScriptModule, types.ModuleType, type)):
            return value
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._replace_tensor(value)
        if kind in _MAPPINGS or kind in _SEQUENCES:
            new = copy.copy(value)
            self._replaced[id(value)] = value, new
            new.clear()
            if kind in _MAPPINGS:
                new.update([(self._replace(k, depth), self._replace(v, depth)) for k, v in value.items()])
            else:
                (new.update if kind is set else new.extend)([self._replace(v, depth) for v in value])
            return new
        if kind is tuple:
            return tuple([self._replace(v, depth) for v in value])
        if kind is functools.partial:
            arguments = self._replace((value.args, value.keywords), depth)
            return functools.partial(self._replace(value.func, depth), *arguments[0], **arguments[1])
        self._replaced[id(value)] = value, value
        if kind is types.MethodType:
            self._replace(value.__self__, depth)
            self._replace(value.__func__, depth)
        elif kind is types.FunctionType:
            self._enter_function(value, depth)
        else:
            self._enter_object(value, depth)
        return value

    def _replace_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Only an optimizer's states are made anew; the operators that meet others adopt them."""
        known = self.fakes.of(tensor)
        if known is not None or not self._in_optimizer:
            return tensor if known is None else known
        is_counter = tensor.dim() == 0 and tensor.device.type == "cpu"
        return (self._on_host if is_counter else self.fakes).make(tensor, readable=True)

    def _enter_function(self, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] in ("torch", "analyzer") or depth > _DEEPEST:
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.undo.append(functools.partial(setattr, cell, "cell_contents", value))
            cell.cell_contents = self._replace(value, depth)
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, name)
            if value:
                self.undo.append(functools.partial(setattr, function, name, value))
                setattr(function, name, self._replace(value, depth))
        variables = function.__globals__
        for name in _list_globals(function.__code__) & variables.keys():
            value = variables[name]
            self.undo.append(functools.partial(variables.__setitem__, name, value))
            variables[name] = self._replace(value, depth + 1)

    def _enter_object(self, value: Any, depth: int) -> None:
        kind, attributes = type(value), getattr(value, "__dict__", None)
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        is_foreign = kind.__module__.startswith(("torch.", "types", "builtins")) and not kind.__module__.startswith(
            "torch.optim.")
        if type(attributes) is not dict or depth >= _DEEPEST or is_foreign:
            return
        self.undo.append(functools.partial(_set_contents, attributes, dict(attributes)))
        before, self._in_optimizer = self._in_optimizer, is_optimizer
        attributes.update([(key, self._replace(held, depth + 1)) for key, held in attributes.items()
                           if key not in REGISTRIES])
        self._in_optimizer = before
        if callable(value) and not isinstance(value, nn.Module):
            self._replace(value.__call__, depth)


def _set_contents(mapping: dict[Any, Any], contents: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(contents)


def _list_globals(code: types.CodeType) -> set[str]:
    """Names of the module's variables that a function reads or sets, also in functions within it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    return found.union(*[_list_globals(c) for c in code.co_consts if isinstance(c, types.CodeType)])
