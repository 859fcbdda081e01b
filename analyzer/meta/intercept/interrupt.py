"""Ctrl-C that waits where something must be changed as a whole."""
from __future__ import annotations

import signal
import threading
from typing import Any


class InterruptsHeld:
    """While it is entered, an interrupt waits; the end of the block raises it.

    For the few milliseconds in which functions of torch are replaced or put back. Only the main thread is ever
    interrupted, so that it alone waits, and only for a handler of Python's.

    >>> from contextlib import suppress
    >>> done = []
    >>> with suppress(KeyboardInterrupt), InterruptsHeld():
    ...     signal.raise_signal(signal.SIGINT)
    ...     done.append("all")
    >>> done
    ['all']
    """

    __slots__ = ("_handler", "_waits")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._waits = False
        if threading.current_thread() is threading.main_thread() and callable(
                handler := signal.getsignal(signal.SIGINT)):
            self._handler = handler
            signal.signal(signal.SIGINT, self._wait)

    def _wait(self, *_: object) -> None:
        self._waits = True

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._waits:
                self._handler(signal.SIGINT, None)
