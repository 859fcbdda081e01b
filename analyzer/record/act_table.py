"""Acts of the allocator kept in columns: some twenty bytes each."""
from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

Act = tuple[str, int, int, int]
"""One act of the allocator: action, address, bytes, and the index of the operator call in or before which it happened."""


class ActTable(Sequence[Act]):
    """A list of `Act`, each of which is made when it is read. `leave` keeps places for acts that are written later."""

    def __init__(self) -> None:
        self._actions = array("B")
        self._addresses = array("Q")
        self._sizes = array("Q")
        self._calls = array("I")
        self._action_at: list[str] = []
        self._action_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._actions)

    def append(self, action: str, address: int, nbytes: int, call: int) -> None:
        """Write an act behind the others."""
        self._actions.append(self._number_action(action))
        self._addresses.append(address)
        self._sizes.append(nbytes)
        self._calls.append(call)

    def extend(self, action: str, addresses: Sequence[int], sizes: Sequence[int], call: int) -> None:
        """Write acts of one kind behind the others."""
        count = len(addresses)
        self._actions.extend([self._number_action(action)] * count)
        self._addresses.extend(addresses)
        self._sizes.extend(sizes)
        self._calls.extend([call] * count)

    def leave(self, count: int) -> None:
        """Keep places for acts to be written later."""
        for column in (self._actions, self._addresses, self._sizes, self._calls):
            column.frombytes(bytes(count * column.itemsize))

    def write(self, index: int, action: str, address: int, nbytes: int, call: int) -> None:
        """Write an act into a place that was left for it."""
        self._actions[index] = self._number_action(action)
        self._addresses[index], self._sizes[index], self._calls[index] = address, nbytes, call

    def _number_action(self, action: str) -> int:
        found = self._action_of.get(action)
        if found is None:
            found = self._action_of[action] = len(self._action_at)
            self._action_at.append(action)
        return found

    @overload
    def __getitem__(self, index: int) -> Act: ...
    @overload
    def __getitem__(self, index: slice) -> list[Act]: ...
    def __getitem__(self, index: int | slice) -> Act | list[Act]:
        if isinstance(index, slice):
            return list(zip(map(self._action_at.__getitem__, self._actions[index]), self._addresses[index], self._sizes[index], self._calls[index]))
        return self._action_at[self._actions[index]], self._addresses[index], self._sizes[index], self._calls[index]

    def __iter__(self) -> Iterator[Act]:
        return zip(map(self._action_at.__getitem__, self._actions), self._addresses, self._sizes, self._calls)
