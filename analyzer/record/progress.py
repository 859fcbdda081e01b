"""Tells a watcher how far a run has come."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watcher = Callable[[float, str], None]
"""Called with the share that is done, from 0 to 1, and what is being done."""


class _Watched(threading.local):
    watcher: Watcher | None = None


_watched = _Watched()


def report_progress(share: float, what: str) -> None:
    """Tell this thread's watcher, if there is one."""
    if _watched.watcher is not None:
        _watched.watcher(min(1.0, share), what)


@contextmanager
def watch_progress(watcher: Watcher) -> Iterator[None]:
    """Let ``watcher`` know what runs in this thread for the length of a block."""
    before, _watched.watcher = _watched.watcher, watcher
    try:
        yield
    finally:
        _watched.watcher = before
