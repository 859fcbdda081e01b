"""How a call of a torch function reads as a graph node."""
from __future__ import annotations

import copy
import operator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from .call_target import name_target

Tensor = torch.Tensor

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_OTHERS = "eq ne lt le gt ge neg pos abs invert getitem setitem".split()

#: dunder method -> operator function; reflected ones swap their operands
OPERATOR_OF = {f"__{n}__": getattr(operator, f"__{n}__") for n in (*_OPERATORS, *_OTHERS)}
IN_PLACE_OF = {f"__i{n}__": getattr(operator, f"__i{n}__") for n in _OPERATORS}
REFLECTED_OF = {f"__r{n}__": getattr(operator, f"__{n}__") for n in _OPERATORS}
for _old, _new in (("div", "truediv"), ("idiv", "itruediv"), ("rdiv", "rtruediv")):
    for _table in (OPERATOR_OF, IN_PLACE_OF, REFLECTED_OF):
        if f"__{_new}__" in _table:
            _table[f"__{_old}__"] = _table[f"__{_new}__"]

#: operators that torch tells a function mode of as of another method
METHOD_OF = {
    "__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul", "__matmul__": "matmul", "__sub__": "sub",
    "__truediv__": "div", "__mod__": "remainder", "__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_",
    "__itruediv__": "div_", "__imod__": "remainder_", "__ifloordiv__": "floor_divide_", "__rand__": "bitwise_and",
    "__ror__": "bitwise_or", "__rxor__": "bitwise_xor", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt",
    "__ge__": "ge", "__neg__": "neg", "__pos__": "positive", "__abs__": "abs"}

#: operators of Tensor that carry another method's name: __pow__ is a wrapper around pow
_RENAMED = {f: n for table in (OPERATOR_OF, IN_PLACE_OF, REFLECTED_OF) for n in table
            if (f := getattr(Tensor, n, None)) is not None and getattr(Tensor, f.__name__, None) is not f}

#: calls that matter although they return no tensor
EFFECTS = frozenset({"__setitem__", "__set__", "backward", "retain_grad", "register_hook",
                     "register_prehook", "register_post_accumulate_grad_hook", "register_multi_grad_hook", "remove",
                     "set_", "_assert", "_assert_async", "manual_seed", "seed", "set_state"})
#: calls that turn contents of a tensor into Python values
READS = frozenset({"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__",
                   "__index__", "__contains__", "is_nonzero", "equal", "allclose", "__dlpack__"})
#: those that give the same for the same contents, as a value that can be compared
REPEATED = READS - {"numpy", "__array__", "__dlpack__"}
#: calls that tell Python code how many elements there are
_SIZES = frozenset({"size", "numel", "nelement", "__len__"})


class NodeCall(NamedTuple):
    """Kind, target and arguments of the node that repeats a call."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def describe_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: str = "") -> NodeCall:
    """Tensor methods become ``call_method``, operators and properties the Python functions that stand for them.

    ``operator`` is the one that is being evaluated, if any: ``"__add__"``.
    """
    name = _name_of(func)
    if operator and getattr(Tensor, METHOD_OF[operator]) is func:
        name, func = operator, getattr(Tensor, operator)
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        attribute = getattr(owner, "__name__", None) or owner.fget.__name__
        if name == "__get__":
            return NodeCall("call_function", getattr, (args[0], attribute), {})
        return NodeCall("call_function", setattr, (args[0], attribute, args[1]), {})
    if args and isinstance(args[0], Tensor) and name and getattr(Tensor, name, None) is func:
        if name in OPERATOR_OF:
            return NodeCall("call_function", OPERATOR_OF[name], args, kwargs)
        if name in IN_PLACE_OF:
            return NodeCall("call_function", IN_PLACE_OF[name], args, kwargs)
        if name in REFLECTED_OF:
            return NodeCall("call_function", REFLECTED_OF[name], (args[1], args[0]), kwargs)
        if name == "__deepcopy__":
            return NodeCall("call_function", copy.deepcopy, args[:1], {})
        return NodeCall("call_method", name, args, kwargs)
    return NodeCall("call_function", name_target(func), args, kwargs)


def _name_of(func: Any) -> str:
    renamed = _RENAMED.get(func) if isinstance(func, FunctionType) else None
    return renamed or str(getattr(func, "__name__", ""))


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a tensor that exists."""
    name = _name_of(func)
    if name in EFFECTS or name in IN_PLACE_OF or kwargs.get("out") is not None:
        return True
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    return name.endswith("_") and not name.endswith("__")


def is_functional(func: Any) -> bool:
    """Whether a function is one of torch.nn.functional that is written in Python."""
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional"


def reads_size(func: Any) -> bool:
    """Whether a call tells Python code how large a tensor is."""
    return _name_of(func) in _SIZES or getattr(func, "__self__", None) is Tensor.shape
