"""Lives of storages, their numbers kept in columns: a log has about one for every two calls."""
from __future__ import annotations

from array import array
from copy import deepcopy

from .numbering import Numbering


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
