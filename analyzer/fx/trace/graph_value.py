"""Python values as arguments of graph nodes."""
from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from analyzer.errors import InputError

from .call_target import BuildDict, BuildList, BuildObject, CallTarget
from .function_call import NodeCall
from .structure import children, holds_tensor, is_plain_object

if TYPE_CHECKING:
    from .tape import Tape

Tensor = torch.Tensor
_LITERALS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
             type(Ellipsis), range, enum.Enum)


def to_argument(tape: Tape, value: Any) -> Any:
    """``value`` as a node's argument: tensors become nodes, containers keep their form, objects are rebuilt or held."""
    if isinstance(value, Tensor):
        return tape.node_of(value)
    if isinstance(value, fx.Node):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        # before what is a literal: numpy.float64 is a float, but generated code does not know its name
        return value.item()
    if isinstance(value, _LITERALS):
        return value
    if kind is tuple or kind is torch.Size:
        found = tape.find(value)
        return tuple(to_argument(tape, v) for v in value) if found is None else found
    if kind is list:
        return [to_argument(tape, v) for v in value]
    if kind is dict and all(isinstance(k, _LITERALS) for k in value):
        return {k: to_argument(tape, v) for k, v in value.items()}
    if kind is slice:
        return slice(to_argument(tape, value.start), to_argument(tape, value.stop), to_argument(tape, value.step))
    found = tape.find(value)
    if found is not None:
        return found
    if isinstance(value, nn.Module):
        return tape.module_node(value)
    if holds_tensor(value) or isinstance(value, (tuple, dict, list)):
        return _rebuild(tape, value)
    return tape.attribute(value, "_object", value)


def _rebuild(tape: Tape, value: Any) -> fx.Node:
    """A node that makes an object like ``value`` from its parts."""
    kind = type(value)
    if isinstance(value, tuple):
        items = tuple(to_argument(tape, v) for v in value)
        args = items if hasattr(value, "_fields") else (items,)
        return tape.create_from(
            NodeCall("call_function",
                     CallTarget(kind) if kind.__module__.startswith("torch") else kind, args, {}))
    if _is_output_class(value):
        fields = {a.key: to_argument(tape, v) for a, v in children(value) if v is not None}
        return tape.create_from(NodeCall("call_function", kind, (), fields))
    attributes = {k: to_argument(tape, v) for k, v in getattr(value, "__dict__", {}).items()}
    if isinstance(value, dict):
        entries = [(to_argument(tape, k), to_argument(tape, v)) for k, v in value.items()]
        return tape.create_from(NodeCall("call_function", BuildDict(kind), (entries, attributes), {}))
    if isinstance(value, list):
        return tape.create_from(
            NodeCall("call_function", BuildList(kind), ([to_argument(tape, v) for v in value], attributes), {}))
    if not is_plain_object(value):
        raise InputError(f"{kind.__module__}.{kind.__qualname__} holds tensors in a way that a graph cannot rebuild; "
                         f"return or pass tensors, containers, dataclasses or objects with a __dict__")
    return tape.create_from(NodeCall("call_function", BuildObject(kind), (), attributes))


def _is_output_class(value: Any) -> bool:
    """A dataclass whose constructor takes exactly its fields, such as transformers' ``ModelOutput``."""
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.init and (not hasattr(value, "__post_init__") or hasattr(
        value, "to_tuple")) and all(f.init for f in type(value).__dataclass_fields__.values())
