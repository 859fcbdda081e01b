"""What modules' code could read or change besides its arguments: attributes, objects, globals, closures, generators."""
from __future__ import annotations

import contextvars
import gc
import os
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from functools import _lru_cache_wrapper, partial
from itertools import repeat
from operator import is_
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from analyzer.meta.structure import read_slot
from analyzer.record.tensor_walk import REGISTRIES

from .reachable_code import CodeSearch, is_standard, is_stateless, is_written_iterator
from .value import (
    IMMUTABLE,
    MISSING,
    MOST_OBJECTS,
    PLAIN,
    UNREADABLE,
    HeldItems,
    WeakTensor,
    are_alike,
    behind_proxy,
    describe_tensor_state,
    find_added,
    is_equal,
    look_up,
    read_generators,
    refill_environment,
    refill_mapping,
    refill_of,
    replace_items,
    set_values,
    storage_of,
    unwatched,
    watch_contents,
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
        self.mappings: list[tuple[Any, tuple[Any, ...], Sequence[Any]]] = []
        self._held = HeldItems(())
        self.sequences: list[tuple[Any, Any]] = []
        self.empty: list[Any] = []  #: containers without items
        #: what reads the state of an object, what sets it, and what it was
        self.objects: list[tuple[Any, Callable[[], Any], Callable[[Any], Any], Any]] = []
        #: classes, what is in them, and the names of what was
        self.classes: list[tuple[type, Any, frozenset[str]]] = []
        self.rows: list[tuple[Any, Any, list[str], Iterable[Any]]] = []  #: of classes and namespaces: what is in them
        self.places: list[tuple[Any, str, Any]] = []  #: of cells and slots
        self.tensors: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self.seen: set[int] = set() if seen is None else seen

    def add(self, other: StateRecord) -> None:
        self.give_up(other.unreadable)
        for name in ("functions", "mappings", "sequences", "empty", "objects", "classes", "rows", "places", "tensors"):
            getattr(self, name).extend(getattr(other, name))

    def give_up(self, reason: str | None) -> None:
        self.unreadable = self.unreadable or reason

    def let_die(self, values: Sequence[Any]) -> Sequence[Any]:
        """The same values, tensors by weak references unless they are kept."""
        if self.keeps or not any(map(isinstance, values, repeat(torch.Tensor))):
            return values
        return [WeakTensor(value) if isinstance(value, torch.Tensor) else value for value in values]

    def add_places(self, holder: Any, names: Sequence[str], values: Sequence[Any]) -> None:
        self.places += zip(repeat(holder), names, self.let_die(values))

    def add_object(self, value: Any, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
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
                        held = [t for t in value.values() if t is not None]
                        self.tensors += [(weakref.ref(t), describe_tensor_state(t)) for t in held]
                        for tensor in held:
                            for attribute in vars(tensor).values():
                                self.capture(attribute)
            else:
                self.capture(value)
                if isinstance(value, (FunctionType, MethodType, partial)):
                    self.functions.append(value)
                elif isinstance(value, dict) and name.endswith("_hooks"):
                    self.functions += value.values()

    def add_mapping(self, mapping: Any) -> None:
        self.mappings.append((mapping, tuple(mapping), self.let_die(tuple(mapping.values()))))

    def capture(self, value: Any) -> None:
        waiting, seen = [value], self.seen
        while waiting:
            found = waiting.pop()
            if (kind := type(found)) in weakref.ProxyTypes:
                found = behind_proxy(found)
                kind = type(found)
            if kind in PLAIN or isinstance(found, IMMUTABLE) or (key := id(found)) in seen:
                continue
            seen.add(key)
            if len(seen) > MOST_OBJECTS:
                self.give_up("it reaches more objects than are compared")
                return
            waiting += [one for one in self._take(found, kind) if type(one) not in PLAIN]

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
        if kind is MappingProxyType:
            return () if "__doc__" in value else gc.get_referents(value)  # every class's own names have this one
        return self._take_object(value, kind)

    def _take_function(self, function: FunctionType) -> Iterable[Any]:
        attributes = function.__dict__
        if not is_stateless(function):
            self.add_mapping(attributes)
        cells = function.__closure__ or ()
        for cell in cells:
            self.add_places(cell, ("", ), (look_up(cell, ""), ))
        return [*(function.__defaults__ or ()), *(look_up(cell, "") for cell in cells),
                *(function.__kwdefaults__ or {}).values(), *attributes.values()]

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, UNREADABLE):
            self.give_up(f"it uses a {kind.__name__}, whose state cannot be read")
        elif isinstance(value, contextvars.ContextVar):
            return self._take_variable(value)
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
        elif hasattr(kind, "__next__") and not is_written_iterator(kind):
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

    def _take_variable(self, variable: contextvars.ContextVar[Any]) -> Iterable[Any]:
        def read() -> Any:
            try:
                return variable.get()  # its own default, where it has one and is not set
            except LookupError:
                return MISSING

        before = read()
        self.add_object(variable, lambda: id(read()),
                        lambda old: variable.set(before) if before is not MISSING else None)
        return () if before is MISSING else (before,)

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

    def put_back(self) -> None:
        for _, _, restore in self.list_changes():
            restore()

    def list_changes(self) -> Iterator[tuple[str, Iterable[Any], Callable[[], Any]]]:
        """Of each holder whose contents changed: what it is, what it holds now, what gives it what it held."""
        for container in filter(None, self.empty):
            yield ("an empty container, to which it adds",
                   container.values() if isinstance(container, dict) else container, container.clear)
        if self._held.count != len(self.mappings):
            self._held = HeldItems(self.mappings)
        for mapping, keys, values in () if self._held.are_there() else self.mappings:
            if len(mapping) != len(keys) or not are_alike(mapping.values(), values) or not all(
                    map(is_, mapping, keys)) and tuple(mapping) != keys:
                yield ("an attribute of a module or an item of a dictionary", mapping.values(),
                       partial(refill_mapping, mapping, keys, values))
        for sequence, items in self.sequences:
            if sequence != items if isinstance(items, set) else len(sequence) != len(items) or not are_alike(
                    sequence, items):
                yield "a list or set", sequence, partial(replace_items, sequence, items)
        for cls, contents, known in self.classes:
            for name in find_added(contents, known):
                yield "an attribute of a class", (contents[name],), partial(delattr, cls, name)
        for holder, contents, names, found in self.rows:
            now = [unwatched(contents.get(name, MISSING)) for name in names]
            if not are_alike(now, found):
                name = next(n for n, a, b in zip(names, now, found) if not are_alike((a,), (b,)))
                yield f"the variable {name}", now, partial(set_values, holder, names, now, found)
        for holder, name, value in self.places:
            now = [look_up(holder, name)]
            if not are_alike(now, (value,)):
                yield (f"the variable {name or 'of a closure'}", now,
                       partial(set_values, holder, (name,), now, (value,)))
        for held, read, write, before in self.objects:
            if not is_equal(read(), before):
                yield "an array or a generator of random numbers", (held,), partial(write, before)


_METHODS = (FunctionType, staticmethod, classmethod, property)
_NOT_CAPTURED = PLAIN.union(_METHODS)


class CodeRecord(StateRecord):
    """What the code of modules of some classes, and functions, reach outside of the modules; ``inside`` are the modules
    by id.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any], inside: set[int],
                 seen: set[int] | None = None, keeps: bool = False) -> None:
        super().__init__(keeps, seen)
        self._inside = inside
        self.search = CodeSearch()
        self.follow(classes, functions)

    def follow(self, classes: Iterable[type], functions: Iterable[Any]) -> None:
        """Capture what the code of modules of ``classes``, and ``functions``, reach that was not captured yet."""
        reachable = self.search.find(classes, functions)
        self.give_up(reachable.unreadable)
        if reachable.reads_environment:
            self.add_object(os.environ, os.environ.copy, refill_environment)
        self.classes += [(cls, vars(cls), frozenset(vars(cls))) for cls in reachable.classes]
        for cls in reachable.classes:
            contents = vars(cls)
            names = [name for name in contents if name[:2] != "__" and unwatched(contents[name]) is not MISSING]
            found = [unwatched(contents[name]) for name in names]
            self.rows.append((cls, contents, names, self.let_die(found)))
            for value in found:
                if type(value) not in _NOT_CAPTURED and not isinstance(value, _METHODS):
                    self._capture_reached(value)
        self._capture_places(reachable.places)

    def _capture_places(self, places: Sequence[tuple[Any, str]]) -> None:
        rows: dict[int, tuple[Any, Any, list[str], list[Any]]] = {}  # what is in one namespace is compared together
        for holder, name in places:
            value = look_up(holder, name)
            if type(holder) is dict:
                _, _, names, found = rows.setdefault(id(holder), (holder, holder, [], []))
                names.append(name)
                found += self.let_die((value, ))
            else:
                self.add_places(holder, (name, ), (value, ))
            if type(value) not in PLAIN:
                self._capture_reached(value)
        self.rows += rows.values()

    def _capture_reached(self, value: Any) -> None:
        """What reachable code finds under a name."""
        if isinstance(value, nn.Module):
            for module in value.modules():
                self.capture_module(module, id(module) not in self._inside)
        self.capture(value)


class StateFingerprint(StateRecord):
    """The state of ``modules``, of the ``values`` that they are given, of what their code and ``functions`` reach, and
    of the generators of random numbers, to be compared and put back later. ``unreadable`` says what can be neither.
    Known contents that are read and written are part of it. Tensors die as if there were none.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = (), values: Any = ()) -> None:
        super().__init__()
        modules = list(modules)
        self.functions += functions
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.give_up("it holds a module of TorchScript, which is compiled anew as it runs")
            else:
                self.capture_module(module, own=True)
        self.add(CodeRecord({type(m) for m in modules if not isinstance(m, torch.jit.ScriptModule)}, self.functions,
                            set(map(id, modules)), self.seen))
        for value in self.functions:
            self.capture(value)
        self.capture(values)
        self._contents = watch_contents([tensor for tensor, _ in self.tensors])
        self._random = read_generators()
        self.seen.clear()
        self._later: list[StateRecord] = []

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Compare further modules, of classes that are among those of the others, which run from now on."""
        record = StateRecord()
        for module in modules:
            record.capture_module(module, own=True)
        self._later.append(record)
        self.tensors += record.tensors
        self._contents += watch_contents([tensor for tensor, _ in record.tensors])
        self.give_up(record.unreadable)

    def list_changes(self) -> Iterator[tuple[str, Iterable[Any], Callable[[], Any]]]:
        for record in self._later:  # before those below: of what both have, the first state is the earlier one
            yield from record.list_changes()
        yield from super().list_changes()

    def note_changes(self) -> list[tuple[str, Any]]:
        """What is changed up to now, to be compared with what will be."""
        found: list[tuple[str, Any]] = [(what, [value if type(value) in PLAIN else id(value) for value in now])
                                        for what, now, _ in self.list_changes()]
        return [*found, ("the host's generators of random numbers", read_generators())]

    def change(self) -> str | None:
        for what, _, _ in self.list_changes():
            return what
        if any([(alive := tensor()) is not None and describe_tensor_state(alive) != state
                for tensor, state in self.tensors]):
            return "a tensor's attribute, hook, storage or requires_grad"
        if any([watched.was_read and ((storage := storage_of(tensor())) is None or storage.known is not watched)
                for tensor, watched in self._contents]):
            return "contents of a tensor, which it reads"
        return None if read_generators() == self._random else "the host's generators of random numbers"
