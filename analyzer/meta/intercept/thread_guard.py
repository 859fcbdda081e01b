"""Threads that a forward starts are not under the mode: what they would do with fake tensors is refused."""
from __future__ import annotations

import concurrent
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from types import MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from analyzer.errors import InputError
from analyzer.meta.source_line import first_frame, is_user_code
from analyzer.meta.state import MetaState, active, current
from analyzer.meta.tensor import MetaTensor

from .replacement import Undo, replace

_STARTERS = (threading.__file__, *(path + os.sep for m in (concurrent, multiprocessing) for path in m.__path__))


def guard_threads() -> Iterator[Undo]:
    """Replace what starts threads; each result undoes one replacement."""
    yield replace(threading.Thread, "start", _starting)
    yield replace(ThreadPoolExecutor, "submit", _submitting)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
        yield replace(ThreadPool, name, _submitting)


def _starting(original: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        state = current()
        if state is not None and not state.space.is_shared:  # in which other threads take part
            guard, run = _Guard(state, (thread._args, thread._kwargs)), thread.run  # type: ignore[attr-defined]

            def guarded() -> None:
                with guard.silencing(), guard:
                    run()

            thread.run = guarded  # type: ignore[method-assign]
        original(thread)

    return start


def _submitting(original: Any) -> Any:
    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.space.is_shared:
            return original(pool, function, *args, **kwargs)
        guard = _Guard(state, (args, kwargs))

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with guard:
                return function(*args, **kwargs)

        return original(pool, guarded, *args, **kwargs)

    return submit


class _Guard(TorchFunctionMode):
    """Refuses torch functions of fake tensors in a thread, and such tensors among what the thread is ``given``."""

    def __init__(self, state: MetaState, given: Any) -> None:
        super().__init__()
        self.state = weakref.ref(state)  # which a pool's thread outlives
        frame = first_frame(lambda file: is_user_code(file) and not file.startswith(_STARTERS))
        self.place = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        self.failure: InputError | None = None
        self._check("gives tensors to", given)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if active.dispatch_mode is None and type(func) is not MethodWrapperType:  # which reads an attribute
            self._check(f"runs {torch.overrides.resolve_name(func) or func} in", (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _check(self, does: str, given: Any) -> None:
        state = self.state()
        if state is None or state.recorder is None and state.tape is None or not any(
                isinstance(value, MetaTensor) for value in tree_leaves(given)):
            return
        self.failure = InputError(f"forward {does} a thread that it starts{self.place}. Threads are not followed: run "
                                  "this in the thread of forward")
        state.failure = state.failure or self.failure
        raise self.failure

    @contextmanager
    def silencing(self) -> Iterator[None]:
        """A block of a thread whose failure the thread that runs forward tells of."""
        try:
            yield
        except InputError as error:
            if error is not self.failure:
                raise
