"""What code that is one node leaves behind besides its result, by what depends on data, and whether the graph reads it.

The node sets the flag, number or item again where the graph runs. Code that is traced would make it a constant of the
graph, so it finds something in its place that tells of being read.
"""
from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from contextvars import ContextVar
from itertools import chain, repeat
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from analyzer.errors import DataDependentError
from analyzer.fx.module_borrow import Borrowed
from analyzer.fx.surroundings import Holders
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.source_line import is_user_code, user_line
from analyzer.meta.state import MetaState
from analyzer.meta.structure import holds_tensor, is_plain_object
from analyzer.state.fingerprint import CodeRecord, StateRecord
from analyzer.state.reachable_code import CodeSearch
from analyzer.state.value import MISSING, PLAIN, are_alike, find_added, look_up, set_value

from .outline import Site, code_of

_SEQUENCES = (list, deque)


class LeakError(DataDependentError):
    """Traced code reads what a node left behind, or a node would read what traced code did."""


class DecidedByData:
    """Stands for a value that data decides; whatever code does with it but compare it by ``is`` calls ``read``."""

    read: Callable[..., NoReturn]

    def __init__(self, read: Callable[..., NoReturn]) -> None:
        object.__setattr__(self, "read", read)

    @property  # type: ignore[misc]  # isinstance() asks for it where the type does not answer
    def __class__(self) -> Any:
        return object.__getattribute__(self, "read")() if is_user_code(
            sys._getframe(1).f_code.co_filename) else DecidedByData


def _read(self: Any, *args: Any) -> NoReturn:
    raise object.__getattribute__(self, "read")()


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor".split()
for _name in (*("bool int float complex index len iter next contains getitem setitem delitem call getattr setattr str "
                "repr format hash eq ne lt le gt ge neg pos abs invert enter exit round trunc floor ceil reversed"
                ).split(), *_BINARY, *("r" + name for name in _BINARY)):
    setattr(DecidedByData, f"__{_name}__", _read)


class _State(Holders, CodeRecord):
    def __init__(self, function: Any, values: Any) -> None:
        self.modules: list[nn.Module] = []
        self.attributes: set[int] = set()  #: ids of what holds the attributes of objects
        with without_modes(), torch._C.DisableTorchFunction():
            super().__init__(classes=(), functions=(), inside=set())
            self.capture(values)
            self.capture(function)
            while code := self.code:
                self.code = []
                self.follow((), code)

    def _take(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, nn.Module):
            self.code.append(kind)
            self.modules.append(value)
        return super()._take(value, kind)

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(contents := getattr(value, "__dict__", None), dict):
            self.attributes.add(id(contents))
        return super()._take_object(value, kind)

    def _capture_places(self, places: Sequence[tuple[Any, str]]) -> None:
        super()._capture_places([(holder, name) for holder, name in places if type(holder) is not dict or is_user_code(
            str(holder.get("__file__")))])  # else of wrappers around the user's functions

    def read_keys(self) -> dict[int, Any]:
        """By id of what the function reaches: the keys, indices and names that it takes of it; None for all."""
        names = self.search.names
        held = (*self.mappings, *self.sequences, *self.places, *self.objects, *zip(self.empty))
        of_modules = (map(id, (vars(m), m._parameters, m._buffers, m._modules)) for m in self.modules)
        return {**{id(holder): None for holder, *_ in held}, **dict.fromkeys([*self.attributes, *chain(*of_modules)],
                names), **{id(holder): names.intersection(keys) for holder, _, keys, _ in self.rows}}

    def places_of(self, value: Any) -> list[tuple[Any, Any]]:
        rows: list[tuple[Any, Iterable[Any], Iterable[Any]]] = [*self.mappings]
        rows += [(holder, names, found) for holder, _, names, found in self.rows]
        rows += [(holder, (name,), (found,)) for holder, name, found in self.places]
        rows += [(holder, range(len(items)), items) for holder, items in self.sequences if not isinstance(items, set)]
        return [(holder, key) for holder, keys, found in rows for key, held in zip(keys, found) if held is value]


def _list_changed(record: StateRecord) -> Iterator[tuple[Any, Any, Any, Any]]:
    """What holds another value than when it was recorded: the holder, a key, index or name, the value that was, the one
    that is; for a set, and where a list has another length, its items or length without a key.
    """
    rows: list[tuple[Any, Iterable[Any], Iterable[Any]]] = [(h, names, found) for h, _, names, found in record.rows]
    rows += [(holder, [name], [value]) for holder, name, value in record.places]
    rows += [(mapping, {**dict.fromkeys(keys), **mapping}, map(dict(zip(keys, values)).get, {
        **dict.fromkeys(keys), **mapping}, repeat(MISSING))) for mapping, keys, values in record.mappings
             if len(mapping) != len(keys) or not are_alike(mapping.values(), values)]
    rows += [(cls, added, repeat(MISSING)) for cls, contents, known in record.classes
             if (added := find_added(contents, known))]
    for holder, items in (*record.sequences, *((holder, type(holder)()) for holder in filter(None, record.empty))):
        if isinstance(holder, dict):
            rows.append((holder, holder, repeat(MISSING)))
        elif isinstance(holder, set):
            if holder != items:
                yield holder, None, items, set(holder)
        else:
            rows.append((holder, range(len(holder)), chain(items, repeat(MISSING))))
            if len(holder) != len(items):
                yield holder, None, len(items), len(holder)
    for holder, names, found in rows:
        for name, before in zip(names, found):
            if not are_alike((now := _get(holder, name),), (before,)):
                yield holder, name, before, now


_LISTED = (dict, list, set)  #: of which `module_state` tells what they hold where a module has them
#: kinds of what holds values and is none of Python's own containers: weak ones, views on others
_CONTENTS = (MutableMapping, MutableSequence, MutableSet)


class _Leak(NamedTuple):
    """A place, with what stands in it for what ``values`` of runs, of which the first is the trace's, left there."""

    holder: Any
    key: Any
    stand_in: DecidedByData
    read: Callable[..., NoReturn]
    values: list[Any]

    def put(self, value: Any) -> None:
        if value is MISSING and isinstance(self.holder, dict):
            self.holder.pop(self.key, None)
        elif isinstance(self.holder, (dict, *_SEQUENCES)):
            self.holder[self.key] = value
        else:
            set_value(self.holder, self.key, value)


class Leaks:
    """What the nodes that run code as it is have left in places that code which is traced may read."""

    def __init__(self, wanted: dict[Site, str]) -> None:
        self._wanted = wanted
        self._held: list[_Leak] = []
        self._error: LeakError | None = None
        self._start: Any = None  #: the `_State` that forward began with
        #: by id of a holder, and key: the holder, and what a node set there in the trace and sets where the graph runs
        self.left: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def begin(self, function: Any, values: Any) -> None:
        self._start = _State(function, values)

    def list_set(self, state: _State, rebuilt: set[int]) -> set[str]:
        """What of a function's ``state`` traced code has set; what is of ``rebuilt`` ids, the graph makes anew."""
        with without_modes(), torch._C.DisableTorchFunction():
            rows = [*_list_changed(self._start), *((value, type(value).__name__, before, now)
                    for value, read, _, before in self._start.objects
                    if isinstance(value, ContextVar) and (now := read()) != before)]
        found, keys = set[str](), state.read_keys() if rows else {}
        for holder, key, before, now in rows:
            read = () if id(holder) in rebuilt else keys.get(id(holder), ())
            holds_same = type(before) is type(now) and isinstance(now, (list, tuple)) and len(
                before) == len(now) and are_alike(now, before)
            if (read is None or key in read) and not holds_same and not self._is_left(holder, key, before, now):
                found.add(_name_place(holder, key))
        return found

    def tell(self, record: StateRecord, borrowed: Borrowed, state: MetaState) -> None:
        """Note what traced code left otherwise than ``record`` has it, but for what modules themselves hold."""
        held = {id(value): type(value) for module in borrowed.every for value in vars(module).values()}
        for holder, key, before, now in _list_changed(record):
            file = holder.get("__file__") if type(holder) is dict else None  # of a module of Python
            is_ours = isinstance(now, FunctionType) or file is not None and not is_user_code(str(file))
            if is_ours or issubclass(held.get(id(holder), object), _LISTED) or self._is_left(holder, key, before, now):
                continue
            if before is not None and isinstance(now, torch.Tensor) and borrowed.original_of(now) is before:
                continue
            where = "that a module holds" if id(holder) in held else "in what it reaches outside of modules"
            state.assume(f"forward changes {_name_place(holder, key)} {where}: the graph does not")

        originals = {id(fake): id(original) for original, fake in borrowed.fakes}
        for holder, read, _, before in record.objects:
            if isinstance(holder, _CONTENTS):
                if [originals.get(item, item) for item in read()] != before:  # its values, others than plain ones by id
                    state.assume(f"forward changes a {type(holder).__name__} that it reaches: the graph does not")

    def _is_left(self, holder: Any, key: Any, before: Any, now: Any) -> bool:
        return are_alike((now,), (self.left.get((id(holder), key), (None, before))[1],))

    def show(self) -> None:
        """Let all places hold what the trace left there."""
        self._held = [leak for leak in self._held if _get(leak.holder, leak.key) is leak.stand_in]
        self.vary(0)

    def vary(self, run: int) -> None:
        for leak in self._held:
            leak.put(leak.values[min(run, len(leak.values) - 1)])

    def hide(self) -> None:
        """Let stand-ins be found where nothing else was set."""
        self._held = [leak for leak in self._held if are_alike((_get(leak.holder, leak.key),), leak.values)]
        for leak in self._held:
            leak.put(leak.stand_in)

    def add(self, place: tuple[Any, Any], values: list[Any], site: Site, outer: Site | None, line: str) -> None:
        """``site`` left ``values``, of which data decides at ``line``; ``outer`` is the code around it."""
        name = place[1] if isinstance(place[1], str) and place[1] else f"item {place[1]!r}"

        def read(where: str | None = None) -> NoReturn:
            if outer is not None:
                self._wanted.setdefault(outer, line)
            self._error = self._error or LeakError(
                f"{site} sets {name} by what depends on data at {line}, and forward reads it afterwards"
                f"{where or f', at {user_line()}'}: the graph would keep what it was traced with. Return it, or put "
                "the code that reads it, too, into a submodule or a function, which then becomes one node")
            raise self._error

        self._held = [leak for leak in self._held if leak.holder is not place[0] or leak.key != place[1]]
        self._held.append(_Leak(*place, DecidedByData(read), read, values))

    def explain(self, error: Exception) -> LeakError | None:
        """The error for one of torch, which takes no stand-in as an argument."""
        if self._held and DecidedByData.__name__ in str(error):
            with contextlib.suppress(LeakError):
                self._held[0].read()
        return self._error

    def check(self, borrowed: Borrowed, outlined: Iterable[Site]) -> None:
        """Raise LeakError for what was read, even if code caught the error, and for what code compares by ``is``."""
        if self._error is not None:
            raise self._error
        if self._held:
            search = CodeSearch()
            inside = {id(m) for site in outlined if isinstance(site.owner, nn.Module) for m in site.owner.modules()}
            traced = [m for _, m in borrowed.walked if id(m) not in inside]
            search.find(set(map(type, traced)), [borrowed.root.forward, *(
                held for m in traced for held in vars(m).values() if isinstance(held, FunctionType))])
            hidden = {code_of(vars(site.owner)[site.name]) for site in outlined if site.name}
            codes = {f.__code__ for f in search.seen if isinstance(f, FunctionType)
                     and f.__code__ not in hidden and is_user_code(f.__code__.co_filename)}
            for leak in self._held:
                if isinstance(leak.key, str) and _differ(leak.values) and any(
                        _compares(code, leak.key) for code in codes):
                    leak.read(" by `is` or hasattr()")


class LeakWatch:
    """What a function, which runs several times as it is, leaves behind: first in the trace, then with other data."""

    def __init__(self, leaks: Leaks, function: Any, values: Any) -> None:
        self._leaks, self._make = leaks, functools.partial(_State, function, values)
        self.state = self._after = self._make()
        self._runs: list[dict[tuple[int, Any], tuple[Any, Any, Any, Any]]] = []

    def note(self, copies: Iterable[tuple[Any, Any]] = ()) -> None:
        """A run has ended, which was given copies of some containers and objects."""
        with without_modes(), torch._C.DisableTorchFunction():
            rows = list(_list_changed(self.state))
            for pair in copies:  # plain values that a copy of a dict or an object has and the original has not
                held, copy = (vars(value) if is_plain_object(value) else value for value in pair)
                rows += [(held, key, before, now) for key, now in (copy.items() if isinstance(copy, dict) else ())
                         if type(now) in PLAIN and not are_alike((now,), (before := held.get(key, MISSING),))]
        self._runs.append({(id(row[0]), row[1]): row for row in rows})
        self._is_changed = bool(rows)
        if len(self._runs) == 1 and self._runs[0]:
            self._after = self._make()

    def restart(self) -> None:
        """Let the next run find what the first one found, but for what other nodes leave by other data."""
        if self._is_changed:
            self.state.put_back()
        self._is_changed = True  # until a run ends and is seen to have changed nothing
        self._leaks.vary(len(self._runs))

    def finish(self, site: Site, outer: Site | None, line: str) -> None:
        """Leave what the first run left, and stand-ins for what of it data decides."""
        if self._is_changed or self._runs[0]:
            self._after.put_back()
        self._leaks.left |= {place: (holder, now) for place, (holder, _, _, now) in self._runs[0].items()}
        for place, (holder, key, before, _) in {k: row for run in self._runs for k, row in run.items()}.items():
            values = [run[place][3] if place in run else before for run in self._runs]
            if any(map(holds_tensor, values)) or key is None and not _differ(values):
                continue
            told = site, outer, line
            for where in self._after.places_of(holder) if key is None or MISSING in values else ():
                self._leaks.add(where, [holder, None], *told)  # data decides its length, or whether it has such an item
            if key is not None:
                self._leaks.add((holder, key), values, *told)


def find_leaks(value: Any) -> None:
    """Raise LeakError for containers that hold what a node left: another node would have it as a constant."""
    if type(value) is DecidedByData:
        value.read()
    for item in value.values() if type(value) is dict else value if type(value) in (tuple, list) else ():
        find_leaks(item)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, _SEQUENCES):
        return holder[key] if key < len(holder) else MISSING
    return holder.get(key, MISSING) if isinstance(holder, dict) else look_up(holder, key)


def _name_place(holder: Any, key: Any) -> str:
    return key if isinstance(key, str) and key else f"a {type(holder).__name__}"


def _differ(values: list[Any]) -> bool:
    return not are_alike(values, values[:1] * len(values))


def _compares(code: CodeType, name: Any) -> bool:
    """Whether code takes ``name`` and compares it by ``is``, or asks whether there is such an attribute."""
    found = list(dis.get_instructions(code))
    compared = [i for i, other in enumerate(found) if other.opname == "IS_OP" or other.opname.endswith("NONE")]
    taken = {i for i, one in enumerate(found) if one.argval == name and one.opname.startswith("LOAD")}
    return "hasattr" in code.co_names and name in code.co_consts or any(
        not taken.isdisjoint(range(i - 3, i)) for i in compared)
