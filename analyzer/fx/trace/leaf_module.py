"""Which modules are one node of the graph."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.registry import Call, Registry

from .tracer_impl import LeafRegistry

Impl = Callable[..., Any]


def check_module_class(key: Any, caller: str) -> Any:
    """The key, if it is a class of modules. Raises InputError, which begins with ``caller``, else."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    raise InputError(f"{caller}: must be a class that derives from torch.nn.Module")


register_leaf_module = LeafRegistry("register_leaf_module", check_module_class)
"""Make every module of a class one ``call_module`` node, as those of torch.nn are, except containers.

>>> @register_leaf_module
... class Block(nn.Module):
...     pass
>>> Block in register_leaf_module
True
"""

register_non_leaf_module = LeafRegistry("register_non_leaf_module", check_module_class)
"""Trace into the modules of a class that would be leaves."""

register_leaf_module_impl: Registry[Any, Impl] = Registry(
    "register_leaf_module_impl", check_module_class, Call("impl(module, *args, **kwargs)", 1))
"""Give a leaf module what to run while tracing, in place of its forward: ``impl(module, *args, **kwargs)`` returns
tensors of the right shapes. For modules that cannot run without data; the traced graph calls the module itself.
"""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


# and when that was found: see `is_leaf`
_leaf_classes: weakref.WeakKeyDictionary[type, tuple[int, bool]] = weakref.WeakKeyDictionary()


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` becomes one node: its most derived registered class decides, else whether it is torch.nn's."""
    # none ever shrinks
    registered = register_non_leaf_module.version + register_leaf_module.version + register_leaf_module_impl.version
    found = _leaf_classes.get(type(module))
    if found is None or found[0] != registered:
        found = _leaf_classes[type(module)] = registered, _is_leaf_class(type(module))
    return found[1]


def _is_leaf_class(kind: type[nn.Module]) -> bool:
    for cls in kind.__mro__:
        if cls in register_non_leaf_module:
            return False
        if cls in register_leaf_module or cls in register_leaf_module_impl:
            return True
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    name = kind.__module__
    if name in ("torch.ao.quantization.fake_quantize", "torch.ao.quantization.observer"):  # which ask for their state
        return True
    return (name.startswith(("torch.nn.", "torch.ao.nn.")) and not name.startswith("torch.nn.parallel")
            and kind is not nn.Module and not issubclass(kind, _CONTAINERS))


def find_leaf_impl(module: nn.Module) -> Impl | None:
    """What is registered to run in place of the forward of ``module``, if anything."""
    for cls in type(module).__mro__:
        impl = register_leaf_module_impl.find(cls)
        if impl is not None:
            return impl
    return None
