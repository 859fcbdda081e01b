"""The pair of torch modes that is active in this thread."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .state import MetaState, active


class _Modes(threading.local):
    """The modes that this thread has pushed, if any; nested activations share them."""

    function: Any = None  #: the `MetaFunctionMode`
    dispatch: Any = None  #: the `MetaDispatchMode`


modes = _Modes()


def set_state(state: MetaState | None) -> None:
    """Let what runs in this thread belong to ``state``."""
    active.state = state
    if modes.function is not None and modes.dispatch is not None:
        modes.function.state = modes.dispatch.state = state


def forget_modes() -> None:
    """The modes of this thread are no longer pushed."""
    modes.function = modes.dispatch = None


@contextmanager
def mode_in_force() -> Iterator[None]:
    """Push the function mode again inside its own handler, where torch has taken it off."""
    mode = modes.function
    if mode is None or mode in torch.overrides._get_current_function_mode_stack():
        yield
        return
    with mode:
        yield


def active_dispatch_mode() -> Any:
    """The dispatch half of the mode that is active in this thread."""
    assert modes.dispatch is not None
    return modes.dispatch
