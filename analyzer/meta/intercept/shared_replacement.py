"""Replacements that several users share: those of all threads under a mode, or that are recorded."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .replacement import InterruptsHeld, Undo


class SharedReplacements:
    """Replacements that the first of several users makes and the last puts back, in reverse."""

    def __init__(self, make: Callable[[], Iterable[Undo]]) -> None:
        self._make = make
        self.lock = threading.RLock()
        self._users = 0
        self._undo: list[Undo] = []

    def _put_back(self) -> None:
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            if self._undo:
                self._put_back()

    @contextmanager
    def installed(self) -> Iterator[None]:
        is_counted = False
        try:
            with InterruptsHeld(), self.lock:
                try:
                    if self._users == 0:
                        self._undo.extend(self._make())  # no step of Python's between a replacement and its place here
                    self._users += 1
                    is_counted = True
                except BaseException:
                    if self._users == 0:
                        self._put_back()
                    raise
            yield
        finally:
            if is_counted:
                with InterruptsHeld(), self.lock:
                    self._users -= 1
                    if self._users == 0:
                        self._put_back()
