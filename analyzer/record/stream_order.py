"""The stream of each operator call, and the waits that the program makes; nothing where it uses the default stream."""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from analyzer.meta.stream_mark import StreamAction, StreamMark


class StreamOrder:
    """The program's requests of streams, each at its place among the calls of a log.

    >>> order = StreamOrder()
    >>> order.write(2, StreamAction.SWITCH, 7)
    >>> order.write(4, StreamAction.SWITCH, 0)
    >>> [order.stream_at(call) for call in range(5)]
    [0, 0, 7, 7, 0]
    """

    def __init__(self) -> None:
        self.marks: list[StreamMark] = []
        self._switches: list[tuple[int, int]] = []  # the call before which the current stream changes, and to which

    def __len__(self) -> int:
        return len(self.marks)

    def write(self, call: int, action: StreamAction, stream: int, event: int = 0) -> None:
        """Write a request that is made before ``call``, behind the others."""
        if action is StreamAction.SWITCH:
            self._switches.append((call, stream))
        self.marks.append(StreamMark(call, action, stream, event))

    def stream_at(self, call: int) -> int:
        """The stream that the call of this index is on."""
        place = bisect_right(self._switches, call, key=_first)
        return self._switches[place - 1][1] if place else 0

    def marks_in(self, begin: int, end: int) -> list[StreamMark]:
        """The requests before the calls from ``begin`` to ``end``."""
        return self.marks[bisect_left(self.marks, begin, key=_first):bisect_left(self.marks, end, key=_first)]

    def repeat(self, begin: int, end: int, at: int) -> None:
        """Make the requests before the calls from ``begin`` to ``end`` again, before those from ``at`` on. What was on
        the stream of the first call is on the current one now.
        """
        names = {self.stream_at(begin): (here := self.stream_at(at))}
        for call, action, stream, event in self.marks_in(begin, end):
            self.write(call - begin + at, action, names.get(stream, stream), event)
        if self.stream_at(end - begin + at) != here:
            self.write(end - begin + at, StreamAction.SWITCH, here)

    def list_streams(self) -> list[int]:
        """The numbers of all streams, in the order in which they were used first."""
        return list(dict.fromkeys((0, *_named(self.marks))))


def _first(row: tuple[int, ...]) -> int:
    return row[0]


def _named(marks: Iterable[StreamMark]) -> Iterable[int]:
    return (mark.stream for mark in marks if mark.stream >= 0)
