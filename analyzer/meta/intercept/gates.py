"""The kernels of the simulation in this thread: opened with the outermost mode, closed with it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.cuda import autocast
from analyzer.cuda import kernel_registry as claimed
from analyzer.meta.state import current

from . import compiled_function, higher_order
from .patch import Undo, replace


def open_gates() -> None:
    """Let this thread's operator calls take the claimed device's paths and be cast by autocast."""
    claimed.set_open(True)
    autocast.follow_switch(True)


def close_gates() -> None:
    claimed.set_open(False)
    autocast.follow_switch(False)
    autocast.clear_cache()


@contextmanager
def reopened() -> Iterator[None]:
    """What `open_gates` opened, for calls made from the handler of a dispatch mode."""
    with claimed.gate.reopened(), autocast.gate.reopened():
        yield


def replacements() -> Iterator[Undo]:
    """Register the kernels and follow the switches of autocast; each result undoes one step."""
    from analyzer.cuda import flex_attention  # which need the modes
    from analyzer.cuda.kernels import nested as claimed_nested  # which need the modes

    yield claimed.install()
    yield autocast.uninstall
    yield from higher_order.replacements(
        tuple(getattr(torch._C.DispatchKey, gate.key_name) for gate in (claimed.gate, autocast.gate)))
    yield from flex_attention.replacements()
    yield from claimed_nested.replacements()
    yield from compiled_function.replacements()
    for name in ("set_autocast_enabled", "set_autocast_cpu_enabled"):
        yield replace(torch, name, _around(autocast.install, lambda: autocast.follow_switch(True)))
    yield replace(torch, "clear_autocast_cache", _around(None, autocast.clear_cache))


def _around(before: Callable[[], None] | None, after: Callable[[], None]) -> Callable[[Any], Any]:
    """In threads that are simulated, call ``before`` a switch is turned on what takes long: torch does not turn it off
    where that is interrupted.
    """
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return original(*args, **kwargs)
            if before is not None and args[-1:] == (True,):
                before()
            result = original(*args, **kwargs)
            after()
            return result

        return call

    return make
