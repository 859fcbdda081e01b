"""Whether code asks if two tensors are one object, which decides whether a graph holds for others than it was traced
with: one tensor may be given in two places, as query and key.
"""
from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from torch import fx

from analyzer.errors import InputError

from .input_check import Expected

#: how code takes what may be a tensor, before ``is`` compares it
_TAKES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "BINARY_SUBSCR", "BINARY_OP")


@functools.lru_cache(4096)
def compares_identity(code: CodeType) -> bool:
    """Whether code compares two values with ``is``, neither of them a constant or a name of its module, or asks for
    ``id()`` or ``data_ptr()``.
    """
    found = list(dis.get_instructions(code))
    for i, instruction in enumerate(found):
        if instruction.opname == "IS_OP":
            of_module = found[i - 1].opname == "LOAD_ATTR" and found[i - 2].opname in ("LOAD_GLOBAL", "LOAD_NAME")
            if found[i - 1].opname.startswith(_TAKES) and not of_module:
                return True
        elif instruction.argval == "data_ptr" or instruction.opname == "LOAD_GLOBAL" and instruction.argval == "id":
            return True
    return any(compares_identity(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def check_identity(expected: Iterable[Expected], arguments: Mapping[str, Any]) -> None:
    """Raise InputError where other places among ``arguments`` hold one tensor than when the graph was traced."""
    place_of: dict[int, Expected] = {}  # by id of a tensor
    first: dict[int, tuple[Expected, Any]] = {}
    for place in expected:
        value = place.find(arguments[place.argument]) if place.argument in arguments else None
        if place.shape is None or value is None or isinstance(value, fx.Proxy):
            continue
        other, (mine, tensor) = place_of.setdefault(id(value), place), first.setdefault(place.tensor, (place, value))
        told = "one tensor" if other.tensor != place.tensor else "two tensors" if tensor is not value else ""
        if told:
            traced, pair = ("two", other) if told == "one tensor" else ("one", mine)
            raise InputError(f"{place} and {pair}: {told}, but the graph was traced with {traced}, and its code asks "
                             f"whether they are the same: trace again with {told} in meta_args")
