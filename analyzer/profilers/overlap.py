"""What of one set of intervals lies beside another: communication that is exposed, time in which nothing runs."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Interval = tuple[int, int]  # start, end


class Cover:
    """How much of the time is covered by intervals, which may overlap each other.

    >>> cover = Cover([(0, 10), (5, 20), (30, 40)])
    >>> cover.before(35), cover.within(15, 32), cover.within(20, 30)
    (25, 7, 0)
    """

    def __init__(self, intervals: Iterable[Interval]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts = [start for start, _ in merged]
        self._lengths = [end - start for start, end in merged]
        self._sums = [0, *accumulate(self._lengths)]

    def before(self, time: int) -> int:
        """How much is covered before a time."""
        count = bisect_right(self._starts, time)
        if not count:
            return 0
        return self._sums[count - 1] + min(self._lengths[count - 1], time - self._starts[count - 1])

    def within(self, start: int, end: int) -> int:
        """How much is covered from ``start`` to ``end``."""
        return self.before(end) - self.before(start)


def find_exposed(intervals: Sequence[Interval], cover: Cover) -> list[int]:
    """Of each interval the time that is not covered; where several are at once, it is of the one that began first.

    >>> find_exposed([(10, 30), (0, 15), (28, 45)], Cover([(5, 12), (40, 50)]))
    [15, 8, 10]
    """
    exposed, reached = [0] * len(intervals), 0
    for place in sorted(range(len(intervals)), key=intervals.__getitem__):
        start, end = intervals[place]
        start = max(start, reached)
        if end > start:
            exposed[place], reached = end - start - cover.within(start, end), end
    return exposed
