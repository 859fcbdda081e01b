"""The tape of the thread that traces, and operators of Python that it writes down."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current

from .function_call import METHOD_OF
from .tape import Tape

# The tape of the thread that traces, if it writes down what is called now.

def recording_tape() -> Tape | None:
    """The tape of this thread, if it writes down what is called now: under vmap, only what operators come out of it."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    state = current()
    tape = None if state is None else state.tape
    return tape if isinstance(tape, Tape) and not tape.paused else None


def while_recording(run: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes what takes the place of a function: ``run``, given the tape and the original, in a thread that records."""
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            tape = recording_tape()
            return original(*args, **kwargs) if tape is None else run(tape, original, *args, **kwargs)

        return call

    return make


# Python's operators and the functions of torch.nn.functional become nodes of their own, as those of torch.fx are.
#
# Torch tells a function mode of ``x + y`` as of ``x.add(y)``, and of what a function of torch.nn.functional calls, not
# of the function itself. A proxy of torch.fx sees both, and patterns for graphs are traced with proxies.

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
