"""What names an operator where something is registered for it."""
from __future__ import annotations

import re
from collections.abc import Container
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # public, and not in its __all__

from analyzer.errors import InputError

OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")
_ALWAYS_LOADED = ("aten", "prims")  # `import torch` defines all of theirs


def as_operator(key: Any) -> Any:
    """The operator of what ``@torch.library.custom_op`` made, anything else as it is."""
    return find_operator(key._qualname) if isinstance(key, CustomOpDef) else key


def find_operator(name: str) -> Any:
    """The operator of a name, None where no library that is loaded defines it.

    >>> find_operator("aten::mm"), find_operator("aten::mm.out"), find_operator("aten::nn")
    (<OpOverloadPacket(op='aten.mm')>, <OpOverload(op='aten.mm', overload='out')>, None)
    """
    match = _NAME.fullmatch(name)
    found = None
    if match is not None:
        found = getattr(getattr(torch.ops, match[1]), match[2], None)
        found = found if found is None or match[3] is None else getattr(found, match[3], None)
    return found if isinstance(found, OPERATORS) else None


def check_operator(key: Any, caller: str, functions: Container[Any] | None) -> Any:
    """The operator that ``key`` stands for: that of ``torch.ops`` for what ``@torch.library.custom_op`` made and for a
    name. A name that a library may define later stays as it is, as does a Triton kernel.

    Raises InputError, which begins with ``caller``, for what is no operator: a Python function is one if it is among
    ``functions``, or wherever these are None.

    >>> check_operator("aten::mm", "register_flop_impl('aten::mm')", ())
    <OpOverloadPacket(op='aten.mm')>
    """
    key = as_operator(key)
    if isinstance(key, OPERATORS):
        return key
    if isinstance(key, str):
        return _check_name(key, caller)
    if not callable(key) or functions is not None and isinstance(key, _FUNCTIONS) and key not in functions:
        what = "a Python function becomes one by register_shape_impl" if callable(key) else "as torch.ops.aten.mm"
        raise InputError(f"{caller}: must be an operator ({what}); write @{caller.partition('(')[0]}(operator)")
    return key


def _check_name(name: str, caller: str) -> Any:
    match = _NAME.fullmatch(name)
    if match is None:
        dotted = re.fullmatch(r"(?:torch\.ops\.)?(\w+)\.(\w+)(\.\w+)?", name)
        meant = f"{dotted[1]}::{dotted[2]}{dotted[3] or ''}" if dotted else "namespace::name"
        raise InputError(f"{caller}: is no name of an operator; write {meant!r}, or pass the torch.ops operator")
    found = find_operator(name)
    if found is None and match[1] in _ALWAYS_LOADED:
        raise InputError(f"{caller}: torch {torch.__version__} has no operator of that name")
    return found or name
