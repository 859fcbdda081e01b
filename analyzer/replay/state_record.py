"""What is kept of containers, objects, tensors and places, so that they can be compared and put back later."""
from __future__ import annotations

import contextvars
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from functools import _lru_cache_wrapper, partial
from itertools import repeat
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from analyzer.meta.structure import read_slot
from analyzer.record.tensor_walk import REGISTRIES

from .reachable_code import is_standard, is_stateless
from .state_value import (
    IMMUTABLE,
    MISSING,
    MOST_OBJECTS,
    PLAIN,
    UNREADABLE,
    WeakTensor,
    are_alike,
    describe_tensor_state,
    find_added,
    is_equal,
    look_up,
    refill_of,
    revive,
    set_value,
)

_EMPTY = frozenset((dict, OrderedDict, list, set))


class StateRecord:
    """The state of what is captured. Tensors are kept alive, to be put back, where it ``keeps`` them; elsewhere they
    die as if there were no record. ``seen`` are objects, by id, that another record has.
    """

    def __init__(self, keeps: bool = False, seen: set[int] | None = None) -> None:
        self.unreadable: str | None = None  #: what can be neither compared nor put back
        self.keeps = keeps
        self.functions: list[Any] = []  #: what modules hold that is called
        self.mappings: list[tuple[Any, tuple[Any, ...], Collection[Any]]] = []
        self.sequences: list[tuple[Any, Any]] = []
        self.empty: list[Any] = []  #: containers without items
        #: what reads the state of an object, what sets it, and what it was
        self.objects: list[tuple[Any, Callable[[], Any], Callable[[Any], Any], Any]] = []
        #: classes, what is in them, and the names of what was
        self.classes: list[tuple[type, Any, frozenset[str]]] = []
        #: of classes and namespaces: what is in them
        self.rows: list[tuple[Any, Any, list[str], Iterable[Any]]] = []
        self.places: list[tuple[Any, str, Any]] = []  #: of cells and slots
        self.tensors: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self.seen: set[int] = set() if seen is None else seen

    def add(self, other: StateRecord) -> None:
        """Take over what another record has."""
        self.give_up(other.unreadable)
        for name in ("functions", "mappings", "sequences", "empty", "objects", "classes", "rows", "places", "tensors"):
            getattr(self, name).extend(getattr(other, name))

    def give_up(self, reason: str | None) -> None:
        """Say why the state cannot be known."""
        self.unreadable = self.unreadable or reason

    def let_die(self, values: Collection[Any]) -> Collection[Any]:
        """The same values, tensors by weak references unless they are kept."""
        if self.keeps or not any(map(isinstance, values, repeat(torch.Tensor))):
            return values
        return [WeakTensor(value) if isinstance(value, torch.Tensor) else value for value in values]

    def add_places(self, holder: Any, names: Sequence[str], values: Sequence[Any]) -> None:
        """Keep what ``holder`` has under ``names``."""
        self.places += zip(repeat(holder), names, self.let_die(values))

    def add_object(self, value: Any, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        """Keep the state of an object, which ``read`` tells and ``write`` sets."""
        self.objects.append((value, read, write, read()))

    def capture_module(self, module: nn.Module, own: bool) -> None:
        """Keep what the attributes of a module hold; the attributes and tensors themselves where they are ``own``."""
        contents = module.__dict__
        if own:
            self.add_mapping(contents)
            self.empty += [value for value in contents.values() if type(value) in _EMPTY and not value]
        for name, value in contents.items():
            kind = type(value)
            if kind in PLAIN or kind in _EMPTY and not value:
                continue
            if name in REGISTRIES:
                if own:
                    self.add_mapping(value)
                    if name != "_modules":
                        self.tensors += [(weakref.ref(t), describe_tensor_state(t)) for t in value.values()
                                          if t is not None]
            else:
                self.capture(value)
                if isinstance(value, (FunctionType, MethodType, partial)):
                    self.functions.append(value)
                elif isinstance(value, dict) and name.endswith("_hooks"):
                    self.functions += value.values()

    def add_mapping(self, mapping: Any) -> None:
        """Keep what is in a dictionary, and its order."""
        self.mappings.append((mapping, tuple(mapping), self.let_die(tuple(mapping.values()))))

    def capture(self, value: Any) -> None:
        """Keep the state of ``value`` and of all that is reached from it."""
        waiting, seen = [value], self.seen
        while waiting:
            found = waiting.pop()
            kind = type(found)
            if kind in PLAIN or isinstance(found, IMMUTABLE) or (key := id(found)) in seen:
                continue
            seen.add(key)
            if len(seen) > MOST_OBJECTS:
                self.give_up("it reaches more objects than are compared")
                return
            waiting += self._take(found, kind)

    def _take(self, value: Any, kind: type) -> Iterable[Any]:
        """Keep what tells one object's state; the result are the objects in it."""
        if kind is FunctionType:
            return self._take_function(value)
        if isinstance(value, dict):
            self.add_mapping(value)
            return (*value.values(), *getattr(value, "__dict__", {}).values())
        if isinstance(value, torch.Tensor):
            self.tensors.append((weakref.ref(value), describe_tensor_state(value)))
        if isinstance(value, (torch.Tensor, nn.Module)):
            return ()
        if isinstance(value, (list, deque, set)):
            self.sequences.append((value, set(value) if isinstance(value, set) else list(self.let_die(value))))
        if isinstance(value, (list, deque, set, tuple)):
            return value
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        return self._take_object(value, kind)

    def _take_function(self, function: FunctionType) -> Iterable[Any]:
        attributes = function.__dict__
        if not is_stateless(function):
            self.add_mapping(attributes)
        cells = [(cell, look_up(cell, "")) for cell in function.__closure__ or ()]
        for cell, inner in cells:
            self.add_places(cell, ("", ), (inner, ))
        return [*(function.__defaults__ or ()), *(inner for _, inner in cells),
                *(function.__kwdefaults__ or {}).values(), *attributes.values()]

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, UNREADABLE):
            self.give_up(f"it uses a {kind.__name__}, whose state cannot be read")
        elif isinstance(value, contextvars.ContextVar):
            before = value.get(MISSING)
            self.add_object(value, lambda: id(value.get(MISSING)),
                            lambda old: value.set(before) if before is not MISSING else None)
            return () if before is MISSING else (before,)
        elif isinstance(value, threading.local):
            self.add_mapping(vars(value))
            return vars(value).values()
        elif isinstance(value, random.Random):
            self.add_object(value, value.getstate, value.setstate)
        elif hasattr(kind, "get_state") and kind.__module__.startswith("numpy"):
            self.add_object(value, value.get_state, value.set_state)
        elif hasattr(kind, "bit_generator"):  # a generator of numpy's
            bits = value.bit_generator
            self.add_object(value, lambda: bits.state, lambda old: setattr(bits, "state", old))
        elif hasattr(kind, "tobytes"):  # arrays of numpy and others
            self.add_object(value, value.tobytes, refill_of(value))
        elif isinstance(value, bytearray):
            self.add_object(value, lambda: bytes(value), lambda old: value.__setitem__(slice(None), old))
        elif isinstance(value, _lru_cache_wrapper):
            # a full cache keeps its size when it takes in another result
            was_empty = not value.cache_info().currsize  # what is in another cannot be put back, and stays
            self.add_object(value, lambda: value.cache_info().misses,
                            lambda old: value.cache_clear() if was_empty else None)
        elif hasattr(kind, "__next__"):
            self.give_up(f"it holds an iterator ({kind.__name__}), whose position cannot be read")
        elif isinstance(value, (MutableMapping, MutableSet, MutableSequence)):
            return self._take_collection(value)
        elif not is_stateless(kind) or is_standard(kind):
            slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
            names = [k for row in slots for k in ((row, ) if isinstance(row, str) else row)]
            held = [name for name in names if name not in ("__dict__", "__weakref__")]
            self.add_places(value, held, [read_slot(value, name, MISSING) for name in held])
            if type(contents := getattr(value, "__dict__", {})) is dict and contents:
                self.add_mapping(contents)
            return (*contents.values(), *(read_slot(value, k, None) for k in names))
        return ()

    def _take_collection(self, found: Any) -> Iterable[Any]:
        """Containers of the standard library that are none of Python's own: weak ones, views on others."""
        is_mapping = isinstance(found, MutableMapping)

        def list_values() -> list[Any]:
            return [x for item in found.items() for x in item] if is_mapping else list(found)

        values = list_values()

        def put_back(old: Any) -> None:
            if isinstance(found, MutableSequence):
                found[:] = values
                return
            found.clear()
            for i, value in enumerate(values):
                if not is_mapping:
                    found.add(value)
                elif i % 2:
                    found[values[i - 1]] = value

        self.add_object(found, lambda: [x if type(x) in PLAIN else id(x) for x in list_values()], put_back)
        return values

    # ---- comparing

    def put_back(self) -> None:
        """Give everything that can be compared the state that it had."""
        for _, _, restore in self.list_changes():
            restore()

    def list_changes(self) -> Iterator[tuple[str, Iterable[Any], Callable[[], Any]]]:
        """Of each holder whose contents changed: what it is, what it holds now, what gives it what it held."""
        for container in filter(None, self.empty):
            yield ("an empty container, to which it adds",
                   container.values() if isinstance(container, dict) else container, container.clear)
        for mapping, keys, values in self.mappings:
            if len(mapping) != len(keys) or not are_alike(mapping.values(), values) or not all(
                    map(is_, mapping, keys)) and tuple(mapping) != keys:
                yield ("an attribute of a module or an item of a dictionary", mapping.values(),
                       partial(_refill, mapping, keys, values))
        for sequence, items in self.sequences:
            if sequence != items if isinstance(items, set) else len(sequence) != len(items) or not are_alike(
                    sequence, items):
                yield "a list or set", sequence, partial(_replace_items, sequence, items)
        for cls, contents, known in self.classes:
            for name in find_added(contents, known) if len(contents) != len(known) else ():
                yield "an attribute of a class", (contents[name],), partial(delattr, cls, name)
        for holder, contents, names, found in self.rows:
            now = list(map(contents.get, names, repeat(MISSING)))
            if not are_alike(now, found):
                name = next(n for n, a, b in zip(names, now, found) if not are_alike((a,), (b,)))
                yield f"the variable {name}", now, partial(_set_values, holder, names, now, found)
        for holder, name, value in self.places:
            now = [look_up(holder, name)]
            if not are_alike(now, (value,)):
                yield (f"the variable {name or 'of a closure'}", now,
                       partial(_set_values, holder, (name,), now, (value,)))
        for held, read, write, before in self.objects:
            if not is_equal(read(), before):
                yield "an array or a generator of random numbers", (held,), partial(write, before)


def _refill(mapping: Any, keys: Iterable[Any], values: Iterable[Any]) -> None:
    found = [(key, revive(value, mapping.get(key))) for key, value in zip(keys, values)]
    mapping.clear()
    mapping.update(found)


def _replace_items(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(items, set):
        container.update(items)
    else:
        container.extend([revive(item, None) for item in items])


def _set_values(holder: Any, names: Iterable[str], now: Iterable[Any], values: Iterable[Any]) -> None:
    for name, present, value in zip(names, now, values):
        if not are_alike((present,), (value,)):
            set_value(holder, name, revive(value, present))
