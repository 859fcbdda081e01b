"""Python's operators and the functions of torch.nn.functional become nodes of their own, as those of torch.fx are.

Torch tells a function mode of ``x + y`` as of ``x.add(y)``, and of what a function of torch.nn.functional calls, not
of the function itself. A proxy of torch.fx sees both, and patterns for graphs are traced with proxies.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from analyzer.meta.intercept.replacement import Undo, replace

from .function_call import METHOD_OF
from .recording import recording_tape, while_recording
from .tape import Tape


def operator_replacements() -> Iterator[Undo]:
    """What tells the tape of operators and of functions of torch.nn.functional."""
    for operator in METHOD_OF:
        yield replace(torch.Tensor, operator, while_recording(partial(_operate, operator)))
    yield replace(functional, "has_torch_function", _tell)
    yield replace(functional, "has_torch_function_unary", _tell)
    yield replace(functional, "has_torch_function_variadic", _tell)


def _operate(operator: str, tape: Tape, original: Any, tensor: torch.Tensor, *others: Any) -> Any:
    outer, tape.operator = tape.operator, operator
    try:
        return original(tensor, *others)
    finally:
        tape.operator = outer


def _tell(asks: Any) -> Any:
    """Whether a function is to be given to the function mode: always while its calls are written down."""
    def has_torch_function(*values: Any) -> bool:
        return recording_tape() is not None or bool(asks(*values))

    has_torch_function.in_place_of = getattr(asks, "in_place_of", asks)  # type: ignore[attr-defined]
    return has_torch_function
