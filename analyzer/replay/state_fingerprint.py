"""What the code of modules could read or change besides its arguments: attributes, containers, objects, tensors' own
attributes, globals, closures, defaults, class attributes and random generators.
"""
from __future__ import annotations

import contextvars
import functools
import operator
import os
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

from analyzer.meta.storage import MetaStorage, find_storage
from analyzer.meta.value.known_value import Watched
from analyzer.record.module_walk import REGISTRIES

from .reachable_code import Reachable, find_reachable, is_standard, is_stateless
from .state_value import (
    IMMUTABLE,
    MISSING,
    MOST_OBJECTS,
    PLAIN,
    UNREADABLE,
    WeakTensor,
    are_alike,
    describe_tensor_state,
    empty_cache_of,
    find_added,
    is_equal,
    look_up,
    reaches_outside,
    read_generators,
    refill_environment,
    refill_of,
    revive,
    set_value,
)

_EMPTY = frozenset((dict, OrderedDict, list, set))
_METHODS = (FunctionType, staticmethod, classmethod, property)


class StateFingerprint:
    """The state of ``modules`` and of what their code and ``functions`` reach, to be compared and put back later.

    ``unreadable`` says what can be neither compared nor put back: an iterator, a variable of a thread or context, code
    that asks for what no comparison knows. ``own`` tells whether the modules' attributes and tensors, and
    the generators of random numbers, are part of it: then known contents that are read and written are state as well.
    Tensors are kept alive, to be put back, where it ``keeps`` them; elsewhere they die as if there were no fingerprint.
    ``reachable`` is that of another fingerprint of the same modules, where it was found out just now.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = (), own: bool = True,
                 values: Any = (), keeps: bool = False, reachable: Reachable | None = None) -> None:
        modules = list(modules)
        self.unreadable: str | None = None
        self._keeps = keeps
        self._mappings: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._sequences: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []  # containers without items
        self._objects: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        self._rows: list[tuple[Any, Any, list[str], Iterable[Any]]] = []  # of classes and namespaces: what is in them
        self._places: list[tuple[Any, str, Any]] = []  # of cells and slots
        self._tensors: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self._own_modules = set(map(id, modules))
        self._seen: set[int] = set()
        self._functions: list[Any] = list(functions)
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self._give_up("it holds a module of TorchScript, which is compiled anew as it runs")
            else:
                self._capture_module(module, own)
        self.reachable = reachable = reachable or find_reachable(
            {type(m) for m in modules if not isinstance(m, torch.jit.ScriptModule)}, self._functions)
        self.unreadable = self.unreadable or reachable.unreadable
        if reachable.reads_identities and not own:  # those of other modules are others
            self._give_up("its code asks for id")
        if reachable.reads_environment:
            self._objects.append((os.environ.copy, refill_environment, os.environ.copy()))
        self._class_contents = [vars(cls) for cls in reachable.classes]
        self._class_names = [frozenset(contents) for contents in self._class_contents]
        self._capture_classes(own)
        self._capture_places(own)
        for value in self._functions:
            self._capture(value)
        self._capture(values)
        self._contents = _watch_contents([tensor for tensor, _ in self._tensors]) if own else []
        self._random = read_generators() if own else None
        self._seen.clear()

    # ---- reading

    def _let_die(self, values: Collection[Any]) -> Collection[Any]:
        """The same, tensors by weak references."""
        if self._keeps or not any(map(isinstance, values, repeat(torch.Tensor))):
            return values
        return [WeakTensor(value) if isinstance(value, torch.Tensor) else value for value in values]

    def _add_places(self, holder: Any, names: Sequence[str], values: Sequence[Any]) -> None:
        self._places += zip(repeat(holder), names, self._let_die(values))

    def _give_up(self, reason: str) -> None:
        self.unreadable = self.unreadable or reason

    def _capture_module(self, module: nn.Module, own: bool) -> None:
        contents = module.__dict__
        if own:
            self._add_mapping(contents)
        for name, value in contents.items():
            if type(value) in _EMPTY and not value:
                if own:
                    self._empty.append(value)
            elif name in REGISTRIES:
                if own:
                    self._add_mapping(value)
                    if name != "_modules":
                        self._tensors += [(weakref.ref(t), describe_tensor_state(t)) for t in value.values()
                                          if t is not None]
            elif type(value) not in PLAIN:
                self._capture(value)
                if isinstance(value, (FunctionType, MethodType, functools.partial)):
                    self._functions.append(value)
                elif isinstance(value, dict) and name.endswith("_hooks"):
                    self._functions += value.values()

    def _capture_classes(self, own: bool) -> None:
        for cls, contents in zip(self.reachable.classes, self._class_contents):
            names = [name for name in contents if not name.startswith("__")]
            found = [contents[name] for name in names]
            self._rows.append((cls, contents, names, self._let_die(found)))
            for name, value in zip(names, found):
                if not isinstance(value, _METHODS):
                    self._capture_reached(name, value, own)

    def _capture_places(self, own: bool) -> None:
        rows: dict[int, tuple[Any, Any, list[str], list[Any]]] = {}  # what is in one namespace is compared together
        for holder, name in self.reachable.places:
            value = look_up(holder, name)
            if type(holder) is dict:
                _, _, names, found = rows.setdefault(id(holder), (holder, holder, [], []))
                names.append(name)
                found += self._let_die((value, ))
            else:
                self._add_places(holder, (name, ), (value, ))
            self._capture_reached(name, value, own)
        self._rows += rows.values()

    def _capture_reached(self, name: str, value: Any, own: bool) -> None:
        """What reachable code finds under a name."""
        if not own and reaches_outside(value, self._own_modules):
            self._give_up(f"its code names {name or 'a variable'}, which leads to modules or tensors outside of it")
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._capture_module(module, id(module) not in self._own_modules)
        self._capture(value)

    def _add_mapping(self, mapping: Any) -> None:
        self._mappings.append((mapping, tuple(mapping), tuple(self._let_die(tuple(mapping.values())))))

    def _capture(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            found = waiting.pop()
            kind = type(found)
            if kind in PLAIN or isinstance(found, IMMUTABLE) or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            if len(self._seen) > MOST_OBJECTS:
                self._give_up("it reaches more objects than are compared")
                return
            waiting += self._take(found, kind)

    def _take(self, value: Any, kind: type) -> Iterable[Any]:
        """Keep what tells one object's state; the result are the objects in it."""
        if isinstance(value, torch.Tensor):
            self._tensors.append((weakref.ref(value), describe_tensor_state(value)))
            return ()
        if isinstance(value, nn.Module):
            return ()
        if isinstance(value, tuple):
            return value
        if isinstance(value, dict):
            self._add_mapping(value)
            return (*value.values(), *getattr(value, "__dict__", {}).values())
        if isinstance(value, (list, deque)):
            self._sequences.append((value, list(self._let_die(value))))
            return value
        if isinstance(value, set):
            self._sequences.append((value, set(value)))
            return value
        if isinstance(value, FunctionType):
            if not is_stateless(value):
                self._add_mapping(value.__dict__)
            return self._take_cells(value)
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        return self._take_object(value, kind)

    def _take_cells(self, function: FunctionType) -> Iterable[Any]:
        found = []
        for cell in function.__closure__ or ():
            inner = look_up(cell, "")
            self._add_places(cell, ("", ), (inner, ))
            found.append(inner)
        return (*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(),
                *function.__dict__.values())

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, UNREADABLE):
            self._give_up(f"it uses a {kind.__name__}, whose state cannot be read")
        elif isinstance(value, contextvars.ContextVar):
            return self._take_variable(value)
        elif isinstance(value, threading.local):
            self._add_mapping(vars(value))
            return vars(value).values()
        elif isinstance(value, random.Random):
            self._objects.append((value.getstate, value.setstate, value.getstate()))
        elif hasattr(kind, "get_state") and kind.__module__.startswith("numpy"):
            self._objects.append((value.get_state, value.set_state, value.get_state()))
        elif hasattr(kind, "bit_generator"):  # a generator of numpy's
            bits = value.bit_generator
            self._objects.append((lambda: bits.state, lambda old: setattr(bits, "state", old), bits.state))
        elif hasattr(kind, "tobytes"):  # arrays of numpy and others
            self._objects.append((value.tobytes, refill_of(value), value.tobytes()))
        elif isinstance(value, bytearray):
            self._objects.append((lambda: bytes(value), lambda old: value.__setitem__(slice(None), old), bytes(value)))
        elif isinstance(value, functools._lru_cache_wrapper):
            # a full cache keeps its size when it takes in another result
            self._objects.append((lambda: value.cache_info().misses, empty_cache_of(value), value.cache_info().misses))
        elif hasattr(kind, "__next__"):
            self._give_up(f"it holds an iterator ({kind.__name__}), whose position cannot be read")
        elif isinstance(value, (MutableMapping, MutableSet, MutableSequence)):
            return self._take_collection(value)
        elif not is_stateless(kind) or is_standard(kind):
            slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
            names = [k for row in slots for k in ((row, ) if isinstance(row, str) else row)]
            held = [name for name in names if name not in ("__dict__", "__weakref__")]
            self._add_places(value, held, [getattr(value, name, MISSING) for name in held])
            contents = getattr(value, "__dict__", {})
            if type(contents) is dict and contents:
                self._add_mapping(contents)
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

        self._objects.append((lambda: id(read()), put_back, id(before)))
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

        self._objects.append((read, put_back, read()))
        return [x for item in items for x in (item if isinstance(found, MutableMapping) else (item, ))]

    # ---- comparing

    def change(self) -> str | None:
        """What changed since; None where nothing did."""
        if any(self._empty):
            return "an empty container, to which it adds"
        for mapping, keys, values in self._mappings:
            if len(mapping) != len(keys) or not are_alike(mapping.values(), values) or not all(
                    map(operator.is_, mapping, keys)) and tuple(mapping) != keys:
                return "an attribute of a module or an item of a dictionary"
        for sequence, items in self._sequences:
            if len(sequence) != len(items) or not (sequence == items if isinstance(items, set) else are_alike(
                    sequence, items)):
                return "a list or set"
        if any([len(contents) != len(names) and find_added(contents, names)
                for contents, names in zip(self._class_contents, self._class_names)]):
            return "an attribute of a class"
        if (name := self._find_changed_variable()) is not None:
            return f"the variable {name or 'of a closure'}"
        if any([(alive := tensor()) is not None and describe_tensor_state(alive) != state
                for tensor, state in self._tensors]):
            return "a tensor's attribute, hook, storage or requires_grad"
        if not all([is_equal(read(), before) for read, _, before in self._objects]):
            return "an array or a generator of random numbers"
        if any([watched.was_read and _known_of(tensor()) is not watched for tensor, watched in self._contents]):
            return "contents of a tensor, which it reads"
        is_random = self._random is not None and read_generators() != self._random
        return "the host's generators of random numbers" if is_random else None

    def _find_changed_variable(self) -> str | None:
        for _, contents, names, found in self._rows:
            if all(map(operator.is_, map(contents.get, names, repeat(MISSING)), found)):
                continue
            for name, value in zip(names, found):
                if not are_alike((contents.get(name, MISSING),), (value,)):
                    return name
        for holder, name, value in self._places:
            if not are_alike((look_up(holder, name),), (value,)):
                return name
        return None

    def is_same(self) -> bool:
        """Whether all of it can be read and is what it was."""
        return self.unreadable is None and self.change() is None

    def put_back(self) -> None:
        """Give everything that can be compared the state that it had."""
        for mapping, keys, values in self._mappings:
            if len(mapping) != len(keys) or not are_alike(mapping.values(), values):
                found = [(key, revive(value, mapping.get(key))) for key, value in zip(keys, values)]
                mapping.clear()
                mapping.update(found)
        for container in self._empty:
            container.clear()
        for cls, contents, names in zip(self.reachable.classes, self._class_contents, self._class_names):
            for name in find_added(contents, names):
                delattr(cls, name)
        for sequence, items in self._sequences:
            if isinstance(items, set):
                sequence.clear()
                sequence.update(items)
            elif len(sequence) != len(items) or not are_alike(sequence, items):
                found = [revive(item, None) for item in items]
                sequence.clear()
                sequence.extend(found)
        in_rows = [(holder, *item) for holder, _, names, values in self._rows for item in zip(names, values)]
        for holder, name, value in (*in_rows, *self._places):
            if not are_alike((now := look_up(holder, name),), (value,)):
                set_value(holder, name, revive(value, now))
        for read, write, before in self._objects:
            if not is_equal(read(), before):
                write(before)


def _watch_contents(tensors: Iterable[weakref.ref[torch.Tensor]]) -> list[tuple[weakref.ref[torch.Tensor], Watched]]:
    """See from now on whether known contents are read."""
    found: list[tuple[weakref.ref[torch.Tensor], Watched]] = []
    for ref in tensors:
        tensor = ref()
        storage = None if tensor is None or tensor.layout is not torch.strided else find_storage(tensor)
        if isinstance(storage, MetaStorage) and storage.known is not None:
            watched = storage.known = Watched(storage.known)
            found.append((ref, watched))
    return found


def _known_of(tensor: torch.Tensor | None) -> Any:
    storage = None if tensor is None else find_storage(tensor)
    return storage.known if isinstance(storage, MetaStorage) else None


