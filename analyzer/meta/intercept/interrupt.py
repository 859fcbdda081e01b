"""Signals that wait where something must be changed as a whole. Python calls a signal's handler between any two steps
of the main thread, and what the handler raises leaves the code there: at the first step of an ``__exit__``, which then
never runs, or in a finaliser, which swallows it. So handlers are replaced for the length of a run by some that look
where the code is.
"""
from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import analyzer.memory

# What is not left halfway, by the name of the function or the path of the file: the ends of context managers (also of
# torch and the user's), finalisers, callbacks of weak references, imports, and the books of the simulated allocator.
_WHOLE = frozenset({"__enter__", "__exit__", "__del__", "_find_and_load", "when_gone"})
_WHOLE_FILES = (os.path.dirname(os.path.abspath(analyzer.memory.__file__)) + os.sep, weakref.__file__)

waiting: list[tuple[Callable[..., Any], int]] = []
"""Handlers that were not called yet, with their signals. Where it is not empty, `call_handlers` is due."""


class _Handler:
    """Calls the handler that it replaces, or lets it wait."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if _watch.users and not _watch.may_interrupt(frame):
            waiting.append((self.original, number))
            return None
        return self.original(number, frame)


def _enters(code: CodeType) -> bool:
    """Whether a function is on the way to a block: the ``__enter__`` of a context manager, or a part of one."""
    return code.co_name in ("__enter__", "enter_context") or bool(code.co_flags & inspect.CO_GENERATOR)


class _Watch:
    """Whose code of the main thread may be interrupted."""

    def __init__(self) -> None:
        self.users = 0  #: blocks in which signals may have to wait
        self.holds = 0  #: blocks in which all do
        self._replaced: list[tuple[int, _Handler]] = []
        self._around: set[FrameType] = set()  # callers of the outermost block, which are not looked at

    def enter(self, frame: FrameType | None, holds: int) -> None:
        if self.users:  # counted by the last step: after an error no ``__exit__`` runs
            self.users, self.holds = self.users + 1, self.holds + holds
        else:
            try:
                self.users = self.holds = 1
                self._install(frame)
                self.holds = holds
            except BaseException:  # from a handler that was not replaced yet
                self._restore()
                raise

    def leave(self) -> None:
        if self.users > 1:
            self.users -= 1
        else:
            self.holds += 1
            self._restore()

    def _install(self, frame: FrameType | None) -> None:
        while frame is not None and _enters(frame.f_code):
            frame = frame.f_back
        while frame is not None:
            self._around.add(frame)
            frame = frame.f_back
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                mine = handler if isinstance(handler, _Handler) else _Handler(handler)
                self._replaced.append((number, mine))
                signal.signal(number, mine)

    def _restore(self) -> None:
        """Put back the handlers, all of them also where a signal interrupts this as soon as its own is back. Where a
        block is ended by another thread than the main one, which may not, they stay and let every signal through.
        """
        try:
            while self._replaced and threading.current_thread() is threading.main_thread():
                number, mine = self._replaced[-1]
                if signal.getsignal(number) is mine:
                    signal.signal(number, mine.original)
                self._replaced.pop()
            self._around.clear()
            self.holds = self.users = 0
        finally:
            if self.users:
                self._restore()

    def may_interrupt(self, frame: FrameType | None) -> bool:
        if self.holds:
            return False
        while frame is not None and frame not in self._around:
            code = frame.f_code
            if code.co_name in _WHOLE or code.co_filename.startswith(_WHOLE_FILES):
                return False
            frame = frame.f_back
        return True


_watch = _Watch()


def call_handlers() -> None:
    """Call the handlers of signals that waited, unless the caller must not be interrupted either."""
    if threading.current_thread() is threading.main_thread():
        _call_from(sys._getframe(1))


def _call_from(frame: FrameType | None) -> None:
    while waiting and (not _watch.users or _watch.may_interrupt(frame)):
        handler, number = waiting.pop(0)
        handler(number, frame)


class InterruptsDeferred:
    """In it, a signal that must not leave code halfway waits for the next operator under a mode or the block's end."""

    __slots__ = ("_is_watching",)
    _holds = 0

    def __enter__(self) -> None:
        self._is_watching = threading.current_thread() is threading.main_thread()
        if self._is_watching:
            _watch.enter(sys._getframe(1), self._holds)

    def __exit__(self, *exc: object) -> None:
        if self._is_watching:
            _watch.holds -= self._holds
            _watch.leave()
            _call_from(sys._getframe(1))


class InterruptsHeld(InterruptsDeferred):
    """While it is entered, every signal waits; the end of the block calls its handler.

    Only the main thread is ever interrupted, so that it alone waits, and only for a handler of Python's.

    >>> from contextlib import suppress
    >>> done = []
    >>> with suppress(KeyboardInterrupt), InterruptsHeld():
    ...     signal.raise_signal(signal.SIGINT)
    ...     done.append("all")
    >>> done
    ['all']
    """

    __slots__ = ()
    _holds = 1
