"""What is kept of containers, objects, tensors and places, so that they can be compared and put back later."""
from __future__ import annotations

import contextvars
import functools
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, MutableMapping, MutableSequence, MutableSet, Sequence
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from analyzer.record.module_walk import REGISTRIES

from .reachable_code import is_standard, is_stateless
from .state_value import (
    IMMUTABLE,
    MISSING,
    MOST_OBJECTS,
    PLAIN,
    UNREADABLE,
    WeakTensor,
    describe_tensor_state,
    empty_cache_of,
    look_up,
    refill_of,
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
        self.mappings: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self.mappings_of_tensors: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []  #: that may die
        self.sequences: list[tuple[Any, Any]] = []
        self.empty: list[Any] = []  #: containers without items
        self.objects: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        #: of classes and namespaces: what is in them
        self.rows: list[tuple[Any, Any, list[str], Iterable[Any]]] = []
        self.places: list[tuple[Any, str, Any]] = []  #: of cells and slots
        self.tensors: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self.seen: set[int] = set() if seen is None else seen

    def add(self, other: StateRecord) -> None:
        """Take over what another record has."""
        self.give_up(other.unreadable)
        for name in ("functions", "mappings", "mappings_of_tensors", "sequences", "empty", "objects", "rows", "places",
                     "tensors"):
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
                if isinstance(value, (FunctionType, MethodType, functools.partial)):
                    self.functions.append(value)
                elif isinstance(value, dict) and name.endswith("_hooks"):
                    self.functions += value.values()

    def add_mapping(self, mapping: Any) -> None:
        """Keep what is in a dictionary, and its order."""
        if not mapping:
            self.mappings.append((mapping, (), ()))
            return
        values = tuple(mapping.values())
        held = tuple(self.let_die(values))
        (self.mappings if held is values else self.mappings_of_tensors).append((mapping, tuple(mapping), held))

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
            return ()
        if isinstance(value, nn.Module):
            return ()
        if isinstance(value, tuple):
            return value
        if isinstance(value, (list, deque)):
            self.sequences.append((value, list(self.let_die(value))))
            return value
        if isinstance(value, set):
            self.sequences.append((value, set(value)))
            return value
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        return self._take_object(value, kind)

    def _take_function(self, function: FunctionType) -> Iterable[Any]:
        attributes, cells, by_name = function.__dict__, function.__closure__, function.__kwdefaults__
        if not is_stateless(function):
            self.add_mapping(attributes)
        found = list(function.__defaults__ or ())
        for cell in cells or ():
            inner = look_up(cell, "")
            self.add_places(cell, ("", ), (inner, ))
            found.append(inner)
        if by_name:
            found += by_name.values()
        if attributes:
            found += attributes.values()
        return found

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, UNREADABLE):
            self.give_up(f"it uses a {kind.__name__}, whose state cannot be read")
        elif isinstance(value, contextvars.ContextVar):
            return self._take_variable(value)
        elif isinstance(value, threading.local):
            self.add_mapping(vars(value))
            return vars(value).values()
        elif isinstance(value, random.Random):
            self.objects.append((value.getstate, value.setstate, value.getstate()))
        elif hasattr(kind, "get_state") and kind.__module__.startswith("numpy"):
            self.objects.append((value.get_state, value.set_state, value.get_state()))
        elif hasattr(kind, "bit_generator"):  # a generator of numpy's
            bits = value.bit_generator
            self.objects.append((lambda: bits.state, lambda old: setattr(bits, "state", old), bits.state))
        elif hasattr(kind, "tobytes"):  # arrays of numpy and others
            self.objects.append((value.tobytes, refill_of(value), value.tobytes()))
        elif isinstance(value, bytearray):
            self.objects.append((lambda: bytes(value), lambda old: value.__setitem__(slice(None), old), bytes(value)))
        elif isinstance(value, functools._lru_cache_wrapper):
            # a full cache keeps its size when it takes in another result
            self.objects.append((lambda: value.cache_info().misses, empty_cache_of(value), value.cache_info().misses))
        elif hasattr(kind, "__next__"):
            self.give_up(f"it holds an iterator ({kind.__name__}), whose position cannot be read")
        elif isinstance(value, (MutableMapping, MutableSet, MutableSequence)):
            return self._take_collection(value)
        elif not is_stateless(kind) or is_standard(kind):
            slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
            names = [k for row in slots for k in ((row, ) if isinstance(row, str) else row)]
            held = [name for name in names if name not in ("__dict__", "__weakref__")]
            self.add_places(value, held, [getattr(value, name, MISSING) for name in held])
            contents = getattr(value, "__dict__", {})
            if type(contents) is dict and contents:
                self.add_mapping(contents)
            return (*contents.values(), *(getattr(value, k, None) for k in names))
        return ()

    def _take_variable(self, variable: contextvars.ContextVar[Any]) -> Iterable[Any]:
        def read() -> Any:
            try:
                return variable.get()
            except LookupError:
                return MISSING

        before = read()

        def put_back(old: Any) -> None:
            if before is not MISSING:
                variable.set(before)

        self.objects.append((lambda: id(read()), put_back, id(before)))
        return () if before is MISSING else (before, )

    def _take_collection(self, found: Any) -> Iterable[Any]:
        """Containers of the standard library that are none of Python's own: weak ones, views on others."""
        items = list(found.items()) if isinstance(found, MutableMapping) else list(found)

        def put_back(old: Any) -> None:
            if isinstance(found, MutableSequence):
                found[:] = items
                return
            found.clear()
            for item in items:
                if isinstance(found, MutableSet):
                    found.add(item)
                else:
                    found[item[0]] = item[1]

        def read() -> Any:
            return [x if type(x) in PLAIN else id(x) for item in (
                found.items() if isinstance(found, MutableMapping) else [(x, ) for x in found]) for x in item]

        self.objects.append((read, put_back, read()))
        return [x for item in items for x in (item if isinstance(found, MutableMapping) else (item, ))]
