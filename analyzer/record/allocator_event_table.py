"""Acts of the allocator kept in columns: some twenty bytes each."""
from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from .numbering import Numbering

AllocatorEvent = tuple[str, int, int, int]
"""One allocator event: action, address, bytes, and the operator call in or before which it happened."""


class AllocatorEventTable(Sequence[AllocatorEvent]):
    """A list of `AllocatorEvent`, each of which is made when it is read. `leave` keeps places for events that are
    written later.
    """

    def __init__(self) -> None:
        # places beyond the columns are made when one of them, or one behind them, is written
        self._length = 0
        self._actions = array("B")  # their numbers
        self._addresses = array("q")  # below 0 in a step beyond all addresses, which is refused after that
        self._sizes = array("Q")
        self._calls = array("I")
        self._numbering: Numbering[str] = Numbering()

    def __len__(self) -> int:
        return self._length

    def _make_places(self) -> None:
        count = self._length - len(self._actions)
        for column in (self._actions, self._addresses, self._sizes, self._calls):
            column.frombytes(bytes(count * column.itemsize))

    def append(self, action: str, address: int, nbytes: int, call: int) -> None:
        """Write an act behind the others."""
        if self._length > len(self._actions):
            self._make_places()
        self._length += 1
        self._actions.append(self._numbering[action])
        self._addresses.append(address)
        self._sizes.append(nbytes)
        self._calls.append(call)

    def extend(self, action: str, addresses: Sequence[int], sizes: Sequence[int], call: int) -> None:
        """Write events of one kind behind the others."""
        count = len(addresses)
        if self._length > len(self._actions):
            self._make_places()
        self._length += count
        self._actions.extend([self._numbering[action]] * count)
        self._addresses.extend(addresses)
        self._sizes.extend(sizes)
        self._calls.extend([call] * count)

    def leave(self, count: int) -> None:
        """Keep places for events to be written later."""
        self._length += count

    def write(self, index: int, action: str, address: int, nbytes: int, call: int) -> None:
        """Write an act into a place that was left for it."""
        if index >= len(self._actions):
            self._make_places()
        self._actions[index] = self._numbering[action]
        self._addresses[index], self._sizes[index], self._calls[index] = address, nbytes, call

    @overload
    def __getitem__(self, index: int) -> AllocatorEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[AllocatorEvent]: ...
    def __getitem__(self, index: int | slice) -> AllocatorEvent | list[AllocatorEvent]:
        if isinstance(index, slice):
            return list(
                zip(map(self._numbering.keys_at.__getitem__, self._actions[index]), self._addresses[index],
                    self._sizes[index], self._calls[index]))
        return self._numbering.keys_at[
            self._actions[index]], self._addresses[index], self._sizes[index], self._calls[index]

    def __iter__(self) -> Iterator[AllocatorEvent]:
        return zip(map(self._numbering.keys_at.__getitem__, self._actions), self._addresses, self._sizes, self._calls)
