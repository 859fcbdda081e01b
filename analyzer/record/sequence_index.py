"""Which call made the autograd node of a number: numbers follow one another, so an array does."""
from __future__ import annotations

from array import array


class SequenceIndex:
    """A mapping from sequence numbers of autograd nodes to indices of calls."""

    __slots__ = ("_first", "_calls")

    def __init__(self) -> None:
        self._first = 0
        self._calls = array("i")  # -1: no call

    def get(self, sequence: int) -> int | None:
        """The call of a number, or None."""
        place = sequence - self._first
        found = self._calls[place] if 0 <= place < len(self._calls) else -1
        return None if found < 0 else found

    def __setitem__(self, sequence: int, call: int) -> None:
        if not self._calls:
            self._first = sequence
        place = sequence - self._first
        if place < 0:  # older than all others: a call beside nodes that were made before the recording
            self._calls[:0] = array("i", [-1]) * -place
            self._first, place = sequence, 0
        elif place >= len(self._calls):
            self._calls.extend([-1] * (place + 1 - len(self._calls)))
        self._calls[place] = call

    def add(self, first: int, last: int, call: int) -> None:
        """Give ``call`` the node ``last``, and those from ``first`` on to it that have none."""
        if first == last and last - self._first == len(self._calls) > 0:  # most calls make one node
            self._calls.append(call)
            return
        for sequence in range(first, last):
            if self.get(sequence) is None:
                self[sequence] = call
        self[last] = call
