"""Small integers that stand for keys, so that a column can hold them."""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class Numbering(dict[K, int]):
    """The number of each key, in the order in which they were first asked for; ``keys_at`` has the key of each number.

    >>> numbers = Numbering(["free"])
    >>> numbers["alloc"], numbers["free"], numbers["alloc"], numbers.keys_at
    (1, 0, 1, ['free', 'alloc'])
    """

    def __init__(self, keys: Iterable[K] = ()) -> None:
        self.keys_at = list(keys)
        super().__init__(zip(self.keys_at, range(len(self.keys_at))))

    def __missing__(self, key: K) -> int:
        number = self[key] = len(self.keys_at)
        self.keys_at.append(key)
        return number
