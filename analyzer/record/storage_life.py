"""Lives of storages, their numbers kept in columns: a log has about one for every two calls."""
from __future__ import annotations

from array import array
from operator import attrgetter


class LifeTable:
    """The columns behind the lives of one log."""

    __slots__ = ("names", "code_of", "labels", "specs", *(
        "nbytes block_bytes address born died born_call died_call step node module device phase category requires_grad".split()))

    def __init__(self) -> None:
        self.nbytes, self.block_bytes, self.address = array("q"), array("q"), array("q")
        self.born, self.died, self.born_call, self.died_call = array("i"), array("i"), array("i"), array("i")
        self.step, self.node, self.module = array("i"), array("i"), array("i")
        self.device, self.phase, self.category = array("H"), array("H"), array("H")  # codes of `names`
        self.requires_grad = array("B")
        self.names = [""]
        self.code_of = {"": 0}
        self.labels: dict[int, str] = {}
        self.specs: dict[int, object] = {}

    def code(self, name: str) -> int:
        """The number that stands for a device, a phase or a category."""
        found = self.code_of.get(name)
        if found is None:
            found = self.code_of[name] = len(self.names)
            self.names.append(name)
        return found


class _Number:
    """An attribute that is a number in a column."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = attrgetter(name)

    def __get__(self, life: StorageLife, owner: type | None = None) -> int:
        value: int = self.column(life.table)[life.row]
        return value

    def __set__(self, life: StorageLife, value: int) -> None:
        self.column(life.table)[life.row] = value


class _Event:
    """An attribute that is a number in a column, or None."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = attrgetter(name)

    def __get__(self, life: StorageLife, owner: type | None = None) -> int | None:
        value: int = self.column(life.table)[life.row]
        return None if value == -1 else value

    def __set__(self, life: StorageLife, value: int | None) -> None:
        self.column(life.table)[life.row] = -1 if value is None else value


class _Name:
    """An attribute that is a name, with its code in a column."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = attrgetter(name)

    def __get__(self, life: StorageLife, owner: type | None = None) -> str:
        code: int = self.column(life.table)[life.row]
        return life.table.names[code]

    def __set__(self, life: StorageLife, value: str) -> None:
        self.column(life.table)[life.row] = life.table.code(value)


class StorageLife:
    """One storage: how large, what for, made where, alive from when to when (indices into the log's events)."""

    __slots__ = ("table", "row", "number")

    def __init__(self, table: LifeTable, number: int, nbytes: int, block_bytes: int, address: int, device: str, born: int, born_call: int,
                 phase: str, step: int, node: int, module: int) -> None:
        self.table, self.row, self.number = table, len(table.nbytes), number
        codes = table.code_of
        table.nbytes.append(nbytes)
        table.block_bytes.append(block_bytes)
        table.address.append(address)
        table.born.append(born)
        table.died.append(-1)
        table.born_call.append(born_call)
        table.died_call.append(-1)
        table.step.append(step)
        table.node.append(node)
        table.module.append(module)
        table.device.append(codes[device] if device in codes else table.code(device))
        table.phase.append(codes[phase] if phase in codes else table.code(phase))
        table.category.append(0)
        table.requires_grad.append(0)

    nbytes = _Number("as asked for")
    block_bytes = _Number("as the allocator gave, rounded")
    address = _Number("where the allocator put it")
    device = _Name("the one that it claims to be on")
    category = _Name('"parameter", "buffer", "input", "gradient", "optimizer state", "cast copy"; "" is undecided')
    born = _Number("the event of its birth")
    died = _Event("the event of its death")
    born_call = _Number("index in `Log.calls` of the call that made it")
    died_call = _Event("index in `Log.calls` of the call in or before which it died")
    phase = _Name("of its birth")
    step = _Number("of its birth")
    node = _Number("that made it, an index in `Log.nodes`")
    module = _Number("that made it, an index in `Log.modules`")

    def belongs(self, category: str, label: str, module: int) -> None:
        """Set what it is for, its name and the module that holds it."""
        table, row = self.table, self.row
        table.category[row], table.labels[row], table.module[row] = table.code(category), label, module

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
        return bool(self.table.requires_grad[self.row])

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.table.requires_grad[self.row] = value

    @property
    def spec(self) -> object:
        """The TensorSpec of an input."""
        return self.table.specs.get(self.row)

    @spec.setter
    def spec(self, value: object) -> None:
        if value is not None or self.row in self.table.specs:
            self.table.specs[self.row] = value
