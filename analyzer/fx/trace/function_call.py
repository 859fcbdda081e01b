"""How a call of a torch function reads as a node of the graph."""
from __future__ import annotations

import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.graph import _is_from_torch
from torch.fx.node import _get_qualified_name


class CallTarget:
    """A callable around ``wrapped``, equal to every other around the same, pickled by reference to it. torch.fx names
    it by ``__module__`` and ``__name__``, and takes names under ``torch`` for paths.
    """

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        name = getattr(wrapped, "name" if isinstance(wrapped, torch.jit.ScriptFunction) else "__name__", None)
        self.__name__ = self.__qualname__ = str(name or type(wrapped).__name__).replace("<lambda>", "function")
        module = str(getattr(wrapped, "__module__", None) or "").replace("<", "_").replace(">", "_")
        self.__module__ = "function" if module.startswith("torch") or not module else module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return hash((type(self), id(self.wrapped)))

    def __reduce__(self) -> Any:
        name = qualified_name(self.wrapped)
        return (type(self), (self.wrapped,)) if name is None else (_rebuild, (type(self), name))

    def __deepcopy__(self, memo: Any) -> CallTarget:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


def _rebuild(kind: type[CallTarget], name: str) -> CallTarget:
    return kind(find_by_name(name))


class ApplyFunction(CallTarget):
    """``Function.apply`` of a custom `torch.autograd.Function`, the class of which is ``wrapped``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped.apply(*args, **kwargs)


class CallByName(CallTarget):
    """Calls what torch has under the name ``wrapped`` when it is called, which a mode may have replaced."""

    def __init__(self, wrapped: str) -> None:
        super().__init__(wrapped)
        self.__name__ = self.__qualname__ = wrapped.rpartition(".")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; nothing without CUDA, which there is while tracing, for a function of CUDA's."""
        if self.wrapped.startswith("torch.cuda.") and not torch.cuda.is_available():
            return None
        return find_by_name(self.wrapped)(*args, **kwargs)


class BuildObject(CallTarget):
    """Makes an object of the class ``wrapped`` without its constructor: of attributes, and a container's items."""

    def __call__(self, items: list[Any], attributes: dict[str, Any]) -> Any:
        """An object of these attributes, and items, which for a mapping are pairs of key and value."""
        new = self.wrapped.__new__(self.wrapped)
        if isinstance(new, list):
            list.extend(new, items)
        base: Any = OrderedDict if isinstance(new, OrderedDict) else dict
        for key, value in items if isinstance(new, dict) else ():
            base.__setitem__(new, key, value)
        if attributes:
            vars(new).update(attributes)
        return new


class HeldModule:
    """A module that a graph module holds without having it as a submodule: the root that it was traced from."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class BuildFunction(CallTarget):
    """Makes a function like ``wrapped`` around the values that it is given for the variables of its closure."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        self.wrapped = self._rebuild(*[CellType() for _ in wrapped.__closure__])

    def __call__(self, *values: Any) -> Any:
        return self._rebuild(*[CellType(v.module if isinstance(v, HeldModule) else v) for v in values])

    def _rebuild(self, *cells: CellType) -> FunctionType:
        old: Any = self.wrapped
        new = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, cells)
        new.__kwdefaults__ = old.__kwdefaults__
        return new


def name_target(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, or a `CallTarget` around it where generated code could not name it."""
    try:
        return func if _is_nameable(func) else CallTarget(func)
    except TypeError:  # not hashable
        return CallTarget(func)


@functools.cache
def _is_nameable(func: Any) -> bool:
    if not hasattr(func, "__name__") or not hasattr(func, "__module__") or func.__name__ == "<lambda>":
        return False
    if _is_from_torch(func):
        return qualified_name(func) is not None
    try:
        return "<" not in _get_qualified_name(func)
    except RuntimeError:
        return False


def qualified_name(func: Any) -> str | None:
    if isinstance(func, CallTarget) or not hasattr(func, "__name__") or not _is_from_torch(func):
        return None
    try:
        name = _get_qualified_name(func)
    except RuntimeError:
        return None
    found = find_by_name(name)
    return name if found is func or found == func else None


def find_by_name(name: str) -> Any:
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


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
                     "register_post_accumulate_grad_hook", "register_multi_grad_hook", "remove",
                     "set_", "_assert", "_assert_async", "manual_seed", "seed", "set_state"})
#: calls that turn contents of a tensor into Python values
READS = frozenset({"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__",
                   "__index__", "__contains__", "is_nonzero", "equal", "allclose", "__dlpack__"})
#: those that give the same for the same contents, as a value that can be compared
REPEATED = READS - {"numpy", "__array__", "__dlpack__"}
#: those that tell of the tensor itself, which the next one that is given may have otherwise
STATES_OF_AUTOGRAD = frozenset({"requires_grad", "is_leaf", "grad_fn", "is_inference"})
STATES = STATES_OF_AUTOGRAD | {"_base", "_is_view", "is_contiguous", "stride", "storage_offset", "_version"}
#: calls that tell Python code how many elements there are
_SIZES = frozenset({"size", "numel", "nelement", "__len__"})


class NodeCall(NamedTuple):
    """Kind, target and arguments of the node that repeats a call."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def describe_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: str = "") -> NodeCall:
    """The node of a call, which is that of an ``operator`` such as ``"__add__"`` if one is being evaluated."""
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
        if (stands_for := OPERATOR_OF.get(name) or IN_PLACE_OF.get(name)) is not None:
            return NodeCall("call_function", stands_for, args, kwargs)
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
    name = _name_of(func)
    if name in EFFECTS or name in IN_PLACE_OF or kwargs.get("out") is not None:
        return True
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    return name.endswith("_") and not name.endswith("__")


def is_functional(func: Any) -> bool:
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional"


def read_state(func: Any) -> str:
    name = _name_of(func)
    name = str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name
    return name if name in STATES else ""


def reads_size(func: Any) -> bool:
    return _name_of(func) in _SIZES or getattr(func, "__self__", None) is Tensor.shape
