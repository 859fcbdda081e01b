"""What an allocator is asked for, so that the same can be asked of one that gets blocks back later."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple


class JournalAction(IntEnum):
    """What was asked for: ``ALLOCATE`` and ``USE`` (``record_stream``) name a stream, ``EMPTY`` is ``empty_cache``."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    EMPTY = 3


class JournalEntry(NamedTuple):
    """One request, and where in the run it was made, as the journal was told."""

    action: JournalAction
    place: Any
    address: int
    nbytes: int
    stream: int


@dataclass
class Journal:
    """The requests from one moment on."""

    place: Callable[[], Any]  #: where in the run one is made
    limit_bytes: int | None  #: all that the allocator may reserve
    entries: list[JournalEntry] = field(default_factory=list)

    def note(self, action: JournalAction, address: int = 0, nbytes: int = 0, stream: int = 0) -> None:
        """A request was served."""
        self.entries.append(JournalEntry(action, self.place(), address, nbytes, stream))
