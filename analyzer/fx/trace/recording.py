"""The tape of the thread that traces, if it writes down what is called now."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from analyzer.meta.state import current

from .tape import Tape


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
