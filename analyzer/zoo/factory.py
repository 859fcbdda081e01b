"""Callables of no arguments that return an nn.Module: the one that a name stands for, and which a Python module has."""
from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from torch import nn

from analyzer.errors import TargetError

from .model_target import Target, find_close

_WANTED = "give a callable of no arguments that returns an nn.Module"


def find_factory(module: ModuleType, where: str, name: str, text: str) -> Target:
    """The target ``text`` that is ``name`` (``Net``, ``Holder.make``) in ``module``, which users know as ``where``.

    Raises TargetError where there is none, or one that needs arguments, with the names that would do.
    """
    factory: Any = module
    for part in name.split("."):
        if not hasattr(factory, part):
            public = [name for name, value in vars(factory).items() if callable(value) and not name.startswith("_")]
            raise TargetError(f"{text}: {where} has no {name!r}{find_close(part, public)}"
                              f"{describe_factories(module, where)}")
        factory = getattr(factory, part)
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = "a model already built" if isinstance(factory, nn.Module) else f"of type {type(factory).__name__}"
        raise TargetError(f"{text}: {name} is {kind}; {_WANTED}{describe_factories(module, where)}")
    if needed := _list_required_parameters(factory):
        raise TargetError(
            f"{text}: {name} needs {', '.join(needed)}; {_WANTED}{describe_factories(module, where)}")

    def build() -> nn.Module:
        model = factory()
        if not isinstance(model, nn.Module):
            raise TargetError(f"{text}: {name}() returned a value of type {type(model).__name__}, not an nn.Module")
        return model

    return Target(text, build)


def describe_factories(module: ModuleType, where: str) -> str:
    """The end of an error: which names of ``module`` would do."""
    names = list_factories(module)
    return f"; in {where} these would do: {', '.join(names)}" if names else f"; nothing in {where} would do"


def list_factories(module: ModuleType) -> list[str]:
    """Names that a Python module defines itself and that could be asked for: classes of models, then functions and
    `functools.partial` of them, all without required arguments.

    A function may return anything, unless its annotation says otherwise.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    classes = [name for name, value in public.items() if _is_own_class(value, module) and not _needs_arguments(value)]
    others = [name for name, value in public.items() if _may_return_model(value, module) and not
              _needs_arguments(value)]
    return classes + others


def _is_own_class(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _may_return_model(value: Any, module: ModuleType) -> bool:
    if isinstance(value, functools.partial):
        return not isinstance(value.func, type) or issubclass(value.func, nn.Module)
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    said = value.__annotations__.get("return", nn.Module)
    return issubclass(said, nn.Module) if isinstance(said, type) else said is not None and said != "None"


def _needs_arguments(factory: Any) -> bool:
    return bool(_list_required_parameters(factory))


def _list_required_parameters(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtins have no signature; the call will tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
