"""Threads that a script starts run under the mode too: weights are loaded, and texts generated, in threads. What the
books of the simulated memory are told comes from one thread at a time.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from analyzer.distributed.world_state import current_world, joined
from analyzer.hardware.current_spec import simulated_spec, simulating
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import MetaState, current

TURN_SECONDS = 1.0
"""How long who hands a task to a pool waits for it: tasks run in turn, so that each run of a program makes its tensors
in the same order. A task that takes longer, since it waits for another, is left to itself.
"""


class _Pool(threading.local):
    starts_worker = False  #: its tasks enter the mode, each for itself: a worker can outlive the mode


_pool = _Pool()


def follow_into_threads() -> Iterator[Undo]:
    """Replace what starts threads; each result undoes one replacement."""
    yield replace(threading.Thread, "start", _starting)
    yield replace(ThreadPoolExecutor, "submit", _submitting)


def _joining(state: MetaState, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the mode of this thread, for another one."""
    spec, world = simulated_spec(), current_world()
    state.space.share()

    def run(*args: Any, **kwargs: Any) -> Any:
        with state.join(), simulating(spec), joined(world):
            return function(*args, **kwargs)

    return run


def _starting(original: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        state = current()
        if state is not None and not _pool.starts_worker:
            thread.run = _joining(state, thread.run)  # type: ignore[method-assign]
        original(thread)

    return start


def _submitting(original: Any) -> Any:
    def submit(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        state = current()
        if state is None:
            return original(pool, function, *args, **kwargs)  # type: ignore[no-any-return]
        before, _pool.starts_worker = _pool.starts_worker, True
        try:
            future: Future[Any] = original(pool, _joining(state, function), *args, **kwargs)
        finally:
            _pool.starts_worker = before
        wait([future], TURN_SECONDS)
        return future

    return submit
