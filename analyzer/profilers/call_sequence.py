"""The calls of a log in order, each with what it takes; replays need not be written out for that."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count, repeat

from analyzer.meta.signature import Signature
from analyzer.record.call_table import CallTable
from analyzer.record.log import Log, PlacedPart
from analyzer.record.op_call import OpCall
from analyzer.record.process_group import communicates

from .call_timer import CallTimer, TimedCall

_FUNCTIONAL = "_c10d_functional"
WAIT_TENSOR, WRAP_TENSOR = f"{_FUNCTIONAL}::wait_tensor", f"{_FUNCTIONAL}::_wrap_tensor_autograd"

TimedPlace = tuple[int, TimedCall, bool]
"""The index of a call, what it takes, and whether it may be given the result of a functional collective."""


def is_functional(signature: Signature) -> bool:
    """Whether a call is a functional collective, whose result is waited for where it is used."""
    return communicates(signature) and bool(signature.op.namespace.startswith(_FUNCTIONAL))


class CallSequence:
    """The calls of ``log`` from that at ``begin`` on, where a step begins. It is written out where it matters which
    storages the calls of a replay have, and that is not known before.
    """

    def __init__(self, log: Log, timer: CallTimer, begin: int) -> None:
        self.log, self.timer, self._begin = log, timer, begin
        self.waits = any(is_functional(tally.call.signature) for tally in log.tallies())
        if self.waits and not all(part.find_call for part in log.placed_parts()):
            log.write_out()
        self._parts = [part for part in log.placed_parts() if part.first_call >= begin]
        self._starts = [part.first_call for part in self._parts]
        self._alike: dict[tuple[int, int, int], tuple[list[TimedCall], list[bool]]] = {}
        self._results: dict[int, set[int]] = {}  # of functional collectives, by id of the table that they are in

    def __iter__(self) -> Iterator[TimedPlace]:
        table, place = self.log.call_slots, self._begin
        for part in self._parts:
            places = table.written_places(place, part.first_call)
            yield from zip(places, self.timer.calls(table, places), repeat(True))
            yield from zip(count(part.first_call), *self._describe(part))
            place = part.first_call
        places = table.written_places(place, len(table))
        yield from zip(places, self.timer.calls(table, places), repeat(True))

    def __getitem__(self, index: int) -> OpCall:
        """A call with its storages."""
        place = bisect_right(self._starts, index) - 1
        if place < 0 or index >= self._starts[place] + self._parts[place].calls:
            return self.log.call_slots[index]
        find = self._parts[place].find_call
        assert find is not None  # else all is written out
        return find(index - self._starts[place])

    def _describe(self, part: PlacedPart) -> tuple[list[TimedCall], list[bool]]:
        """What the calls of a part take, and which may be given a result; parts of one segment are described once."""
        found = self._alike.get(key := (id(part.segment), part.start, part.stop))
        if found is None:
            table, places = part.segment.places(part.start, part.stop, self.log)
            results = self._results_in(table)
            found = self._alike[key] = list(self.timer.calls(table, places)), [
                bool(results) and not results.isdisjoint(table[place].inputs) for place in places]
        return found

    def _results_in(self, table: CallTable) -> set[int]:
        found = self._results.get(id(table))
        if found is None:
            found = self._results[id(table)] = set()
            for call in table.written() if self.waits else ():
                if is_functional(call.signature) or (
                        call.signature.op._schema.name == WRAP_TENSOR and not found.isdisjoint(call.inputs)):
                    found.update(call.outputs)
        return found
