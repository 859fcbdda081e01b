"""The process group and the reduction of a call of torch.distributed."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import current_world

# The process group of a call of torch.distributed.

def find_process_group(given: dict[str, Any]) -> Any:
    """The group among the arguments of an operator, which come by their names: itself, or what its name stands for;
    None where there is none. Raises RuntimeError, as torch does, where no group has the name.
    """
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group  # names have a type of their own since 2.11
        return resolve(name)
    for value in given.values():
        if isinstance(value, dist.ProcessGroup):  # `Any group_name` of the functional collectives takes both
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


# Which reduction a call of torch.distributed does. Since torch 2.10 the script object that an operator is given tells;
# before, it is noted by the methods of process groups that make one.

_METHODS = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
            "reduce_scatter_tensor_coalesced")


class _Noted(threading.local):
    """The reduction that a method of a process group was called with, in this thread, while it runs."""

    reduction: Any = None


_noted = _Noted()


def reduction_name(given: dict[str, Any]) -> str:
    """The reduction of a call, in lower case; "unknown" where nothing tells: with torch 2.9 of calls that C++ makes."""
    op = given["reduce_op"]
    if isinstance(op, str):
        return op.lower()
    if hasattr(op, "op"):
        number = op.op()  # a script object answers with the number of the enumeration
        name = dist.ReduceOp.RedOpType(number).name if isinstance(number, int) else str(number).rpartition(".")[2]
    else:
        name = "unknown" if _noted.reduction is None else _noted.reduction.name
    return name.lower()


def script_objects_tell() -> bool:
    """Whether the script object of a reduction says which it is."""
    private: Any = torch._C
    return any(schema.name == "op" and "c10d.ReduceOp" in str(schema)
               for schema in private._jit_get_custom_class_schemas())


def _note(original: Any, *args: Any, **kwargs: Any) -> Any:
    before = _noted.reduction
    _noted.reduction = _find_reduction([*args, *kwargs.values()])
    try:
        return original(*args, **kwargs)
    finally:
        _noted.reduction = before


def _find_reduction(arguments: list[Any]) -> Any:
    """It comes as itself or in the options of its kind; else it is a sum (torch/csrc/distributed/c10d/Types.hpp)."""
    for value in arguments:
        value = getattr(value, "reduceOp", value)
        if isinstance(value, dist.ReduceOp):
            return getattr(value, "op", value)
    return dist.ReduceOp.SUM


def replacements() -> Iterator[Undo]:
    """What notes reductions; each result undoes one replacement."""
    for name in () if script_objects_tell() else _METHODS:
        yield answer(dist.ProcessGroup, name, _note, passes_original=True, where=current_world)
