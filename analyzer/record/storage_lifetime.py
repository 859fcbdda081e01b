"""The lives of storages, the allocator's events and the order of streams, kept in columns."""
from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeVar, overload

from analyzer.meta.state import StreamAction, StreamMark

# What a recorder notes of a run that is to be captured and replayed.

BORN, DIED, CALLED, HELD, BEGAN, ENDED, TAKEN = range(7)
Event = tuple[int, Any]
"""BORN or DIED with the storage's number, CALLED with the call's index, HELD with (simulated device, block sizes),
BEGAN with the phase, ENDED, or TAKEN with the part of a captured trace that was replayed.
"""
OUTSIDE = -1  #: no node: what runs outside the model (loss, optimizer)


# Small integers that stand for keys, so that a column can hold them.

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


# Acts of the allocator kept in columns: some twenty bytes each.

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


# The stream of each operator call, and the waits that the program makes; nothing where it uses the default stream.

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


# Lives of storages, their numbers kept in columns: a log has about one for every two calls.

class LifetimeTable:
    """The columns behind the storage lifetimes of one log, in an array for each width: each is written at once."""

    __slots__ = ("wide", "narrow", "codes", "code_of", "labels", "specs")

    def __init__(self) -> None:
        self.wide = array("q")     # nbytes, block_bytes, address
        self.narrow = array("i")   # born, died, born_call, died_call, step, node, module; -1 of a death: none yet
        self.codes = array("H")    # device, phase, category: their numbers in `code_of`; whether a gradient is wanted
        self.code_of: Numbering[str] = Numbering([""])
        self.labels: dict[int, str] = {}
        self.specs: dict[int, object] = {}

    def copy(self) -> LifetimeTable:
        """One with the same lifetimes, each of which may change."""
        other = LifetimeTable()
        other.wide, other.narrow, other.codes = self.wide[:], self.narrow[:], self.codes[:]
        other.code_of, other.labels, other.specs = deepcopy(self.code_of), dict(self.labels), dict(self.specs)
        return other


_WIDE, _NARROW, _CODES = 3, 7, 4
_CATEGORY, _REQUIRES_GRAD, _MODULE = 2, 3, 6


class _Attribute:
    """An attribute that is kept in a column."""

    def __init__(self, column: int, meaning: str) -> None:
        self.column, self.__doc__ = column, meaning


class _Wide(_Attribute):
    """An attribute that is a number of 64 bits."""

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> int:
        return lifetime.table.wide[lifetime.row * _WIDE + self.column]

    def __set__(self, lifetime: StorageLifetime, value: int) -> None:
        lifetime.table.wide[lifetime.row * _WIDE + self.column] = value


class _Narrow(_Attribute):
    """An attribute that is a number of 32 bits."""

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> int:
        return lifetime.table.narrow[lifetime.row * _NARROW + self.column]

    def __set__(self, lifetime: StorageLifetime, value: int) -> None:
        lifetime.table.narrow[lifetime.row * _NARROW + self.column] = value


class _Death(_Attribute):
    """An attribute that is a number of 32 bits, or None."""

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> int | None:
        value = lifetime.table.narrow[lifetime.row * _NARROW + self.column]
        return None if value == -1 else value

    def __set__(self, lifetime: StorageLifetime, value: int | None) -> None:
        lifetime.table.narrow[lifetime.row * _NARROW + self.column] = -1 if value is None else value


class _Name(_Attribute):
    """An attribute that is a name, of which its code is kept."""

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> str:
        table = lifetime.table
        return table.code_of.keys_at[table.codes[lifetime.row * _CODES + self.column]]

    def __set__(self, lifetime: StorageLifetime, value: str) -> None:
        lifetime.table.codes[lifetime.row * _CODES + self.column] = lifetime.table.code_of[value]


class StorageLifetime:
    """One storage: how large, what for, made where, alive from when to when (indices into the log's events)."""

    __slots__ = ("table", "row", "number")

    def __init__(self, table: LifetimeTable, number: int, nbytes: int, block_bytes: int, address: int, device: str,
                 born: int, born_call: int, phase: str, step: int, node: int, module: int) -> None:
        codes, code_of = table.codes, table.code_of
        self.table, self.row, self.number = table, len(codes) // _CODES, number
        table.wide.extend((nbytes, block_bytes, address))
        table.narrow.extend((born, -1, born_call, -1, step, node, module))
        codes.extend((code_of[device], code_of[phase], 0, 0))

    def copy_to(self, table: LifetimeTable) -> StorageLifetime:
        """The same storage in a copy of its table."""
        other = object.__new__(StorageLifetime)
        other.table, other.row, other.number = table, self.row, self.number
        return other

    nbytes = _Wide(0, "as asked for")
    block_bytes = _Wide(1, "as the allocator gave, rounded")
    address = _Wide(2, "where the allocator put it")
    born = _Narrow(0, "the event of its birth")
    died = _Death(1, "the event of its death")
    born_call = _Narrow(2, "index in `Log.calls` of the call that made it")
    died_call = _Death(3, "index in `Log.calls` of the call in or before which it died")
    step = _Narrow(4, "of its birth")
    node = _Narrow(5, "that made it, an index in `Log.nodes`")
    module = _Narrow(_MODULE, "that made it, an index in `Log.modules`")
    device = _Name(0, "the simulated device that it is on")
    phase = _Name(1, "of its birth")
    category = _Name(_CATEGORY,
                     '"parameter", "buffer", "input", "gradient", "optimizer state", "cast copy"; "" is undecided')

    def belongs(self, category: str, label: str, module: int) -> None:
        """Set what it is for, its name and the module that holds it."""
        table, row = self.table, self.row
        table.codes[row * _CODES + _CATEGORY] = table.code_of[category]
        table.labels[row], table.narrow[row * _NARROW + _MODULE] = label, module

    def is_for(self, code: int | None) -> bool:
        """Whether its category is that of a code."""
        return self.table.codes[self.row * _CODES + _CATEGORY] == code

    @property
    def label(self) -> str:
        """Its name, where it has one."""
        return self.table.labels.get(self.row, "")

    @label.setter
    def label(self, value: str) -> None:
        if value or self.row in self.table.labels:
            self.table.labels[self.row] = value

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of it is wanted."""
        return bool(self.table.codes[self.row * _CODES + _REQUIRES_GRAD])

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.table.codes[self.row * _CODES + _REQUIRES_GRAD] = value

    @property
    def spec(self) -> object:
        """The TensorSpec of an input."""
        return self.table.specs.get(self.row)

    @spec.setter
    def spec(self, value: object) -> None:
        if value is not None or self.row in self.table.specs:
            self.table.specs[self.row] = value
