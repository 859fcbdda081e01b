"""Laps of a sequence: stretches in a row that are alike, and which item of one stands for which of the next."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


class Chains:
    """Items, each with the one that stands for it in the next lap."""

    def __init__(self) -> None:
        self._next: dict[Hashable, Hashable] = {}
        self._before: dict[Hashable, Hashable] = {}
        self._found: dict[Hashable, tuple[list[Any], int]] = {}

    def add(self, item: Hashable, following: Hashable) -> bool:
        """Whether that agrees with what is known."""
        self._found = {}
        return self._next.setdefault(item, following) == following and (
            self._before.setdefault(following, item) == item)

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

    def follows(self, item: Hashable, other: Hashable, step: int) -> bool | None:
        """Whether ``other`` is ``item`` a lap later (``step`` 1) or before (-1); None where nothing is known."""
        if step < 0:
            item, other = other, item
        if item in self._next:
            return self._next[item] == other
        return False if other in self._before else None

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


def find_run(labels: Sequence[Hashable], agree: Callable[[int, int], bool], laps: int) -> tuple[int, int, int] | None:
    """Start, stop and period of the longest stretch of at least so many laps, of which each agrees with the next."""
    last: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    for i, label in enumerate(labels):
        if label in last:
            distances[i - last[label]] += 1
        last[label] = i
    # what a lap has once is a period apart; what it has several times, less
    best: tuple[int, int, int] | None = None
    for period in sorted(p for p, _ in distances.most_common(32)):
        start, length = _longest(i + period < len(labels) and labels[i] == labels[i + period] and agree(i, i + period)
                                 for i in range(len(labels)))
        if (length + period) // period < laps:
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
