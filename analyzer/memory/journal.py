"""What an allocator is asked for, so that the same can be asked of one that gets blocks back later."""
from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple


class JournalAction(IntEnum):
    """What was asked for: ``ALLOCATE`` and ``USE`` (``record_stream``) name a stream."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    EMPTY = 3


class JournalEntry(NamedTuple):
    """One request, and where in the run it was made, as the journal was told."""

    action: JournalAction
    place: Any
    address: int = 0
    nbytes: int = 0
    stream: int = 0


class Journal:
    """The requests from one moment on; ``place`` tells where in the run each is made, ``limit_bytes`` is all that the
    allocator may reserve.
    """

    def __init__(self, place: Callable[[], Any], limit_bytes: int | None) -> None:
        self._place, self.limit_bytes = place, limit_bytes
        self.entries: list[JournalEntry] = []

    def allocated(self, address: int, nbytes: int, stream: int) -> None:
        """A block was given."""
        self.entries.append(JournalEntry(JournalAction.ALLOCATE, self._place(), address, nbytes, stream))

    def freed(self, address: int) -> None:
        """A block was given back."""
        self.entries.append(JournalEntry(JournalAction.FREE, self._place(), address))

    def used(self, address: int, stream: int) -> None:
        """``record_stream``: a block is used on another stream than that which it was allocated on."""
        self.entries.append(JournalEntry(JournalAction.USE, self._place(), address, 0, stream))

    def emptied(self) -> None:
        """The cache was emptied."""
        self.entries.append(JournalEntry(JournalAction.EMPTY, self._place()))
