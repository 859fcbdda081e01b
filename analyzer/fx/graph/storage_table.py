"""Facts about storages, for as long as they live."""
from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

V = TypeVar("V")


class StorageTable(Generic[V]):
    """A value for each storage, found through any tensor in it, while the storage lives; it keeps none alive.

    >>> table = StorageTable()
    >>> x = torch.zeros(4)
    >>> table.put(x, "zeros")
    >>> table.find(x[1:]), table.find(torch.zeros(4))
    ('zeros', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], V]] = {}

    def put(self, tensor: torch.Tensor, value: V) -> None:
        """Note ``value`` for the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = weakref.ref(storage), value

    def find(self, tensor: torch.Tensor) -> V | None:
        """The value for the storage of ``tensor``, or None."""
        storage = tensor.untyped_storage()
        found = self._entries.get(storage._cdata)
        return None if found is None or found[0]() is not storage else found[1]

    def clear(self) -> None:
        """Forget all values."""
        self._entries.clear()
