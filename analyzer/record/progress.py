"""How far a run is, told to the function that watches it."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Watcher = Callable[[float, str], None]
"""Called with the share that is done, from 0 to 1, and what is being done."""


class _WatchedRun(threading.local):
    watcher: Watcher | None = None


_watched = _WatchedRun()


def report_progress(share: float, what: str) -> None:
    if _watched.watcher is not None:
        _watched.watcher(min(1.0, share), what)


@contextmanager
def watch_progress(watcher: Watcher) -> Iterator[None]:
    before, _watched.watcher = _watched.watcher, watcher
    try:
        yield
    finally:
        _watched.watcher = before


@contextmanager
def progress_part(start: float, stop: float, what: str) -> Iterator[None]:
    """What runs in the block is the part from ``start`` to ``stop`` of the work around it.

    >>> with watch_progress(lambda share, what: print(f"{share:.0%} {what}")):
    ...     with progress_part(0.5, 1.0, "l4"):
    ...         report_progress(0.5, "layer1")
    50% l4
    75% l4: layer1
    """
    outer = _watched.watcher
    if outer is None:
        yield
        return

    def watch(share: float, inner: str) -> None:
        outer(start + (stop - start) * share, f"{what}: {inner}" if inner else what)

    report_progress(start, what)
    with watch_progress(watch):
        yield


def progress_of(index: int, count: int, what: str) -> AbstractContextManager[None]:
    """What runs in the block is one of ``count`` equal parts of the work around it."""
    return progress_part(index / count, (index + 1) / count, what)
