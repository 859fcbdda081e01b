"""The lives of storages, the allocator's events and the order of streams, kept in columns."""
from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from analyzer.meta.address_space import STREAMS_A_DEVICE
from analyzer.meta.state import StreamAction, StreamMark

# What a recorder notes of a run that is to be repeated.

BORN, DIED, CALLED, HELD, BEGAN, ENDED = range(6)
Event = tuple[int, Any]
"""BORN or DIED with the storage's number, CALLED with the call's index, HELD with (simulated device, block sizes),
BEGAN with the phase, or ENDED.
"""
OUTSIDE = -1  #: no node: what runs outside the model (loss, optimizer)


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


AllocatorEvent = tuple[str, int, int, int]
"""One allocator event: action, address, bytes, and the operator call in or before which it happened."""


class AllocatorEventTable(Sequence[AllocatorEvent]):
    """A list of `AllocatorEvent`, made when they are read."""

    def __init__(self) -> None:
        self._numbering: Numbering[str] = Numbering()
        # numbers of actions, addresses (below 0 in a step beyond all of them, which is refused after that), bytes,
        # calls
        self._columns: tuple[Any, ...] = array("B"), array("q"), array("Q"), array("I")

    def __len__(self) -> int:
        return len(self._columns[0])

    def append(self, action: str, address: int, nbytes: int, call: int) -> None:
        self.extend(action, (address,), (nbytes,), call)

    def extend(self, action: str, addresses: Sequence[int], sizes: Sequence[int], call: int) -> None:
        count = len(addresses)
        for column, values in zip(self._columns, ([self._numbering[action]] * count, addresses, sizes, [call] * count)):
            column.extend(values)

    def number_of(self, action: str) -> int:
        """The number that stands for an action in its column."""
        return self._numbering[action]

    def begin_as(self, other: AllocatorEventTable, count: int) -> None:
        """Have the first events of another table."""
        self._numbering = Numbering(other._numbering.keys_at)
        self._columns = tuple([column[:count] for column in other._columns])

    def fill(self, columns: Sequence[Any]) -> None:
        """Add the events whose columns these are: actions by number, addresses, bytes, calls."""
        for column, values in zip(self._columns, columns):
            column.frombytes(np.asarray(values).astype(column.typecode).tobytes())

    def read_changes(self, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """By how many bytes each of the first events changes what is allocated, and in which call."""
        actions, _, sizes, calls = (np.array(column[:stop]) for column in self._columns)
        signs = np.array([{"alloc": 1, "free": -1}.get(name, 0) for name in self._numbering.keys_at], np.int64)
        return signs[actions] * sizes.astype(np.int64), calls.astype(np.int64)

    @overload
    def __getitem__(self, index: int) -> AllocatorEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[AllocatorEvent]: ...
    def __getitem__(self, index: int | slice) -> AllocatorEvent | list[AllocatorEvent]:
        actions, *others = [column[index] for column in self._columns]
        if isinstance(index, slice):
            return list(zip(map(self._numbering.keys_at.__getitem__, actions), *others))
        return self._numbering.keys_at[actions], *others

    def __iter__(self) -> Iterator[AllocatorEvent]:
        actions, *others = self._columns
        return zip(map(self._numbering.keys_at.__getitem__, actions), *others)


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
        #: by index of the device: the call before which its current stream changes, and to which
        self._switches: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self.marks)

    def write(self, call: int, action: StreamAction, stream: int, event: int = 0) -> None:
        if action is StreamAction.SWITCH:
            self._switches.setdefault(stream // STREAMS_A_DEVICE, []).append((call, stream))
        self.marks.append(StreamMark(call, action, stream, event))

    def stream_at(self, call: int, device: int = 0) -> int:
        """The current stream of a device, by its index, at a call."""
        switches = self._switches.get(device, ())
        place = bisect_right(switches, call, key=itemgetter(0))
        return switches[place - 1][1] if place else device * STREAMS_A_DEVICE

    def streams_at(self, call: int) -> dict[int, int]:
        """The current streams at a call of the devices of which one was ever changed, by index."""
        return {device: self.stream_at(call, device) for device in self._switches}

    def marks_in(self, begin: int, end: int) -> list[StreamMark]:
        first, stop = (bisect_left(self.marks, call, key=itemgetter(0)) for call in (begin, end))
        return self.marks[first:stop]

    def repeat(self, begin: int, end: int, at: int) -> None:
        """Make requests again, before the calls from ``at`` on; the stream of the first is now the current one."""
        here = self.streams_at(at)
        names = {self.stream_at(begin, device): stream for device, stream in here.items()}
        for call, action, stream, event in self.marks_in(begin, end):
            self.write(call - begin + at, action, names.get(stream, stream), event)
        for device, stream in here.items():
            if self.stream_at(end - begin + at, device) != stream:
                self.write(end - begin + at, StreamAction.SWITCH, stream)

    def list_streams(self) -> list[int]:
        return list(dict.fromkeys((0, *(mark.stream for mark in self.marks if mark.stream >= 0))))


# Lives of storages, their numbers kept in columns: a log has about one for every two calls.

class LifetimeTable:
    """What the storage lifetimes of one log are made of: the numbers of each in a row."""

    __slots__ = ("numbers", "code_of", "labels", "specs")

    def __init__(self) -> None:
        self.numbers = array("q")
        self.code_of: Numbering[str] = Numbering([""])
        self.labels: dict[int, str] = {}
        self.specs: dict[int, object] = {}


#: the columns of a row, and how many there are
(NBYTES, BLOCK_BYTES, ADDRESS, BIRTH, DEATH, BIRTH_CALL, DEATH_CALL, STEP, NODE, DEVICE, PHASE, CATEGORY, REQUIRES_GRAD,
 MODULE, WIDTH) = range(15)


class _NumberColumn:
    """An attribute that is a number in a column."""

    def __init__(self, column: int, meaning: str) -> None:
        self.column, self.__doc__ = column, meaning

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> int:
        return lifetime.table.numbers[lifetime.row + self.column]

    def __set__(self, lifetime: StorageLifetime, value: int) -> None:
        lifetime.table.numbers[lifetime.row + self.column] = value


class _Death(_NumberColumn):
    """A number, or None: -1."""

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> int | None:  # type: ignore[override]
        value = lifetime.table.numbers[lifetime.row + self.column]
        return None if value == -1 else value

    def __set__(self, lifetime: StorageLifetime, value: int | None) -> None:
        lifetime.table.numbers[lifetime.row + self.column] = -1 if value is None else value


class _Name:
    """A name, of which its code is in a column."""

    def __init__(self, column: int, meaning: str) -> None:
        self.column, self.__doc__ = column, meaning

    def __get__(self, lifetime: StorageLifetime, owner: type | None = None) -> str:
        return lifetime.table.code_of.keys_at[lifetime.table.numbers[lifetime.row + self.column]]

    def __set__(self, lifetime: StorageLifetime, value: str) -> None:
        lifetime.table.numbers[lifetime.row + self.column] = lifetime.table.code_of[value]


class StorageLifetime:
    """One storage: how large, what for, made where, alive from when to when (indices into the log's events)."""

    __slots__ = ("table", "row", "number")

    def __init__(self, table: LifetimeTable, number: int, nbytes: int, block_bytes: int, address: int, device: str,
                 born: int, born_call: int, phase: str, step: int, node: int, module: int) -> None:
        code_of = table.code_of
        self.table, self.row, self.number = table, len(table.numbers), number
        table.numbers.extend((nbytes, block_bytes, address, born, -1, born_call, -1, step, node, code_of[device],
                              code_of[phase], 0, 0, module))

    @staticmethod
    def at(table: LifetimeTable, row: int, number: int) -> StorageLifetime:
        """That of a storage whose row is in the table already."""
        found = object.__new__(StorageLifetime)
        found.table, found.row, found.number = table, row * WIDTH, number
        return found

    nbytes = _NumberColumn(NBYTES, "as asked for")
    block_bytes = _NumberColumn(BLOCK_BYTES, "as the allocator gave, rounded")
    address = _NumberColumn(ADDRESS, "where the allocator put it")
    born = _NumberColumn(BIRTH, "the event of its birth")
    died = _Death(DEATH, "the event of its death")
    born_call = _NumberColumn(BIRTH_CALL, "index in `Log.calls` of the call that made it")
    died_call = _Death(DEATH_CALL, "index in `Log.calls` of the call in or before which it died")
    step = _NumberColumn(STEP, "of its birth")
    node = _NumberColumn(NODE, "that made it, an index in `Log.nodes`")
    device = _Name(DEVICE, "the simulated device that it is on")
    phase = _Name(PHASE, "of its birth")
    category = _Name(CATEGORY,
                     '"parameter", "buffer", "input", "gradient", "optimizer state", "cast copy"; "" is undecided')
    module = _NumberColumn(MODULE, "that made it, an index in `Log.modules`")

    def die(self, event: int, call: int) -> None:
        """Its death, at an event and in or before a call."""
        numbers, row = self.table.numbers, self.row
        numbers[row + DEATH], numbers[row + DEATH_CALL] = event, call

    def place(self, call: int, module: int, node: int, requires_grad: bool) -> None:
        """Let it be made by a module and a node, where that call made it and nothing else is known of it."""
        numbers, row = self.table.numbers, self.row
        if numbers[row + BIRTH_CALL] == call and not numbers[row + CATEGORY]:  # 0 stands for no category
            numbers[row + MODULE], numbers[row + NODE], numbers[row + REQUIRES_GRAD] = module, node, requires_grad

    @property
    def label(self) -> str:
        return self.table.labels.get(self.row, "")

    @label.setter
    def label(self, value: str) -> None:
        if value or self.row in self.table.labels:
            self.table.labels[self.row] = value

    @property
    def requires_grad(self) -> bool:
        return bool(self.table.numbers[self.row + REQUIRES_GRAD])

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.table.numbers[self.row + REQUIRES_GRAD] = value

    @property
    def spec(self) -> object:
        """The TensorSpec of an input."""
        return self.table.specs.get(self.row)

    @spec.setter
    def spec(self, value: object) -> None:
        if value is not None or self.row in self.table.specs:
            self.table.specs[self.row] = value


class LifetimesLater(dict[int, StorageLifetime]):
    """The lifetimes of storages whose rows are in a table already, by number, in order; made when they are asked for.

    >>> table = LifetimeTable()
    >>> first = StorageLifetime(table, 7, 512, 512, 0, "cuda:0", 0, 0, "forward", 0, -1, 0)
    >>> later = LifetimesLater(table, [7], [0])
    >>> 7 in later, later[7].nbytes, [lifetime.number for lifetime in later.values()], later.get(8)
    (True, 512, [7], None)
    """

    def __init__(self, table: LifetimeTable, numbers: Iterable[int], rows: Iterable[int]) -> None:
        super().__init__()
        self._table, self._row_of = table, dict(zip(numbers, rows))
        self._is_filled = False

    def _fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            self.update([(number, StorageLifetime.at(self._table, row, number))
                         for number, row in self._row_of.items()])

    def __missing__(self, number: int) -> StorageLifetime:
        return StorageLifetime.at(self._table, self._row_of[number], number)

    def __contains__(self, number: object) -> bool:
        return number in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._row_of)

    def get(self, number: int, default: Any = None) -> Any:
        return self[number] if number in self._row_of else default

    def keys(self) -> Any:
        return self._row_of.keys()

    def values(self) -> Any:
        self._fill()
        return super().values()

    def items(self) -> Any:
        self._fill()
        return super().items()

    def in_rows(self, rows: Collection[int]) -> list[StorageLifetime]:
        """Those in some rows, in order."""
        return [self[number] for number, row in self._row_of.items() if row in rows]
