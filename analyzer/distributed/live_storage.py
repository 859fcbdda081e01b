"""The storages that are alive in a memory, for a recorder that comes later."""
from __future__ import annotations

import weakref
from collections.abc import Iterator

from analyzer.meta.storage import MetaStorage


class LiveStorages:
    """Hears of births and deaths of storages, and knows which are there."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[MetaStorage]] = {}

    def born(self, storage: MetaStorage) -> None:
        """A storage got its place."""
        self._alive[storage.number] = weakref.ref(storage)

    def died(self, storage: MetaStorage) -> None:
        """A storage is gone."""
        self._alive.pop(storage.number, None)

    def __iter__(self) -> Iterator[MetaStorage]:
        """Those that are alive, in order of birth."""
        return iter([storage for ref in list(self._alive.values()) if (storage := ref()) is not None])
