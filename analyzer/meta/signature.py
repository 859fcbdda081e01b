"""What one kind of operator call is: the operator, and the specs of what goes in and out."""
from __future__ import annotations

import functools
from typing import Any

import torch

from .spec import TensorSpec


@functools.cache
def _argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def name_arguments(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call was given, by the names of the operator's schema; defaults are left out."""
    return {**dict(zip(_argument_names(op), args)), **kwargs}


class Signature:
    """Shared by all calls of one operator with the same specs, scalars and outputs.

    ``args`` and ``kwargs`` are those of the call with every tensor replaced by its `TensorSpec`
    (lists stay lists). ``inputs`` are the tensors among them, flattened in order; ``outputs`` those of the result.
    ``memo`` is where a profiler keeps what it derived, under a key of its own.
    """

    __slots__ = ("op", "args", "kwargs", "inputs", "outputs", "memo")

    def __init__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
                 inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.inputs, self.outputs = inputs, outputs
        self.memo: dict[Any, Any] = {}

    def named_arguments(self) -> dict[str, Any]:
        """See `name_arguments`."""
        return name_arguments(self.op, self.args, self.kwargs)

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(repr, self.args))}) -> {self.outputs}"
