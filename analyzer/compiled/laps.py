"""Laps of a sequence: stretches in a row that are alike, and which item of one stands for which of the next."""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


class Unlike(Exception):
    """Laps are not as alike as they must be to leave some of them out."""


class Chains:
    """Items, each with the one that stands for it in the next lap."""

    def __init__(self) -> None:
        self._next: dict[Hashable, Hashable] = {}
        self._before: dict[Hashable, Hashable] = {}
        self._found: dict[Hashable, tuple[list[Any], int]] = {}

    def allows(self, item: Hashable, following: Hashable) -> bool:
        """Whether what is known agrees with it."""
        return self._next.get(item, following) == following and self._before.get(following, item) == item

    def add(self, item: Hashable, following: Hashable) -> bool:
        """Whether that agrees with what is known."""
        agrees = self.allows(item, following)
        if agrees:
            self._next[item], self._before[following], self._found = following, item, {}
        return agrees

    def find(self, item: Hashable) -> tuple[list[Any], int] | None:
        """The chain of an item, and its place there."""
        if not self._found:
            for first in self._next:
                if first not in self._before:
                    chain = [first]
                    while chain[-1] in self._next:
                        chain.append(self._next[chain[-1]])
                    self._found.update({member: (chain, i) for i, member in enumerate(chain)})
        return self._found.get(item)

    def distance(self, item: Hashable, other: Hashable) -> int | None:
        """How many laps ``other`` is behind ``item``: 0 where they are in two chains, None where neither is in any."""
        found, behind = self.find(item), self.find(other)
        if found is None or behind is None:
            return None if found is behind else 0
        return behind[1] - found[1] if found[0] is behind[0] else 0

    def shift(self, item: Any, laps: int) -> Any:
        """What stands for ``item`` so many laps later; itself where it belongs to no lap, None beyond the ends."""
        found = self.find(item)
        if found is None:
            return item
        chain, place = found
        return chain[place + laps] if 0 <= place + laps < len(chain) else None

    def chains(self) -> list[list[Any]]:
        """All of them."""
        return list({id(found[0]): found[0] for item in self._next if (found := self.find(item))}.values())


def find_run(labels: Sequence[Hashable], agree: Callable[[int, int], bool],
             laps: Callable[[int], int]) -> tuple[int, int, int] | None:
    """Start, stop and period of the longest stretch of which each lap agrees with the next; of a period it has at least
    so many ``laps``.
    """
    before: dict[Hashable, deque[int]] = {}
    distances: Counter[int] = Counter()
    for i, label in enumerate(labels):  # what a lap has several times is often less than a period apart
        places = before.setdefault(label, deque(maxlen=16))
        distances.update([i - place for place in places])
        places.append(i)
    best: tuple[int, int, int] | None = None
    for period in sorted(p for p, _ in distances.most_common(8)):
        start, length = _longest(i + period < len(labels) and labels[i] == labels[i + period] and agree(i, i + period)
                                 for i in range(len(labels)))
        if (length + period) // period < laps(period):
            continue
        if best is None or length + period > 1.25 * (best[1] - best[0]):
            best = start, start + length + period, period
    return best


def _longest(flags: Iterable[bool]) -> tuple[int, int]:
    """Start and length of the longest stretch of true ones."""
    best, start = (0, 0), 0
    for i, flag in enumerate([*flags, False]):
        if not flag:
            if i - start > best[1]:
                best = start, i - start
            start = i + 1
    return best
