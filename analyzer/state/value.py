"""Values that state consists of: how they are compared, looked up, reached and put back."""
from __future__ import annotations

import enum
import operator
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib import import_module
from inspect import getattr_static
from itertools import chain
from types import BuiltinFunctionType, CellType, ModuleType, WrapperDescriptorType
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.intercept.compiled_function import written_function
from analyzer.meta.spec import VALUES
from analyzer.meta.structure import read_slot
from analyzer.meta.value.known_value import Watched
from analyzer.output import hold_over_forks

PLAIN = frozenset(VALUES)
# what an abstract class keeps of the classes that it was asked about shows in nothing
IMMUTABLE = (type, ModuleType, BuiltinFunctionType, WrapperDescriptorType, enum.Enum, frozenset,
             type(vars(Iterable)["_abc_impl"]))
UNREADABLE = (torch.Generator, torch.jit.ScriptFunction)
MOST_OBJECTS = 20_000  # containers and objects: a model that holds more is not compared
MISSING = object()


class WeakTensor:
    """A tensor among values, which a fingerprint does not keep alive."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)


class HeldItems:
    """What mappings held, each given with its keys and values. Most hold it still, which is asked of all at once.

    >>> settings = {"rank": 16}
    >>> held = HeldItems([(settings, tuple(settings), tuple(settings.values()))])
    >>> held.are_there(), settings.update(rank=8), held.are_there()
    (True, None, False)
    """

    def __init__(self, rows: Collection[tuple[Any, Iterable[Any], Iterable[Any]]]) -> None:
        self.count = len(rows)
        self._mappings = [mapping for mapping, _, _ in rows]
        self._keys = [key for _, keys, _ in rows for key in keys]
        self._values = [value for _, _, values in rows for value in values]
        self._weak = [i for i, value in enumerate(self._values) if type(value) is WeakTensor]

    def are_there(self) -> bool:
        """Whether all mappings have these very objects, in this order."""
        values = list(self._values)
        for i in self._weak:
            values[i] = values[i].tensor()
        return sum(map(len, self._mappings)) == len(values) and all(
            map(operator.is_, chain.from_iterable(self._mappings), self._keys)) and all(
            map(operator.is_, chain.from_iterable([mapping.values() for mapping in self._mappings]), values))


def behind_proxy(proxy: Any) -> Any:
    """What a ``weakref.proxy`` stands for; None where that is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def revive(before: Any, now: Any) -> Any:
    """A value that was; what is there now in place of a tensor that died."""
    found = before.tensor() if type(before) is WeakTensor else before
    return now if found is None and before is not None else found


def describe_tensor_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What code can change of a tensor besides its contents."""
    if isinstance(tensor, UninitializedTensorMixin):  # it has neither shape nor storage yet
        return (id(tensor), )
    attributes = tensor.__dict__
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    return (storage, tensor.requires_grad, tensor.is_leaf, tensor.shape, tuple(tensor._backward_hooks or ()),
            tuple(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()),
            tuple((k, v if type(v) in PLAIN else id(v)) for k, v in attributes.items()) if attributes else ())


def are_alike(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether values are the same objects, or plain and equal."""
    return all(map(operator.is_, now, before)) or all([
        a is b or (b.tensor() is a if type(b) is WeakTensor else type(a) is type(b) and type(a) in PLAIN and a == b)
        for a, b in zip(now, before)])


def is_equal(now: Any, before: Any) -> bool:
    """Whether two states are the same, down to the items of arrays in them."""
    if isinstance(before, dict):
        return now.keys() == before.keys() and all([is_equal(now[key], value) for key, value in before.items()])
    if isinstance(before, tuple):
        return len(now) == len(before) and all(map(is_equal, now, before))
    return bool(now.tobytes() == before.tobytes() if hasattr(before, "tobytes") else now == before)


def look_up(holder: Any, name: str) -> Any:
    """What a dictionary, cell, class, module or object holds under a name; MISSING where it holds nothing."""
    if type(holder) is CellType:
        try:
            return written_function(holder.cell_contents)
        except ValueError:  # not set yet
            return MISSING
    if type(holder) is dict:
        return holder.get(name, MISSING)
    return unwatched(vars(holder).get(name, MISSING)) if isinstance(holder, (type, ModuleType)) else read_slot(
        holder, name, MISSING)


def set_value(holder: Any, name: str, value: Any) -> None:
    """Let a holder hold a value under a name, or nothing."""
    if type(holder) is dict:
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
        return
    name = name or "cell_contents"  # the name in a cell is ""
    if value is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def refill_mapping(mapping: Any, keys: Iterable[Any], values: Iterable[Any]) -> None:
    found = [(key, revive(value, mapping.get(key))) for key, value in zip(keys, values)]
    mapping.clear()
    for key, value in found:  # a Counter's update() adds
        mapping[key] = value


def replace_items(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(items, set):
        container.update(items)
    else:
        container.extend([revive(item, None) for item in items])


def set_values(holder: Any, names: Iterable[str], now: Iterable[Any], values: Iterable[Any]) -> None:
    """Put back what a holder had under names, where that is not what it has now."""
    for name, present, value in zip(names, now, values):
        if not are_alike((present,), (value,)):
            set_value(holder, name, revive(value, present))


def refill_of(array: Any) -> Callable[[Any], None]:
    copy = array.copy() if hasattr(array, "copy") and not hasattr(array, "frombytes") else None

    def refill(old: bytes) -> None:
        if hasattr(array, "frombytes"):
            del array[:]
            array.frombytes(old)
        elif copy is not None:
            array[...] = copy
    return refill


def find_added(contents: Mapping[str, Any], names: frozenset[str]) -> set[str]:
    """Attributes that a class has besides ``names`` and those whose reads are watched."""
    return {name for name in contents.keys() - names if type(contents[name]) is not _WatchedAttribute}


def refill_environment(old: dict[str, str]) -> None:
    """Put back the variables of the process's environment, one by one: other threads read it meanwhile."""
    for name in os.environ.keys() - old.keys():
        del os.environ[name]
    for name, value in old.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def read_generators() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators of random numbers. Numpy imports its own when it is first asked
    for, which torch does at its first layer norm on meta: it is there from the first look on.
    """
    if "numpy" not in sys.modules:
        return (random.getstate(), )
    _, keys, *rest = import_module("numpy.random").get_state()  # waits for a thread that imports it
    return random.getstate(), keys.tobytes(), *rest


def watch_contents(tensors: Iterable[weakref.ref[torch.Tensor]]) -> list[tuple[weakref.ref[torch.Tensor], Watched]]:
    """See from now on whether known contents are read."""
    found: list[tuple[weakref.ref[torch.Tensor], Watched]] = []
    for ref in tensors:
        storage = storage_of(ref())
        if storage is not None and storage.known is not None:
            watched = storage.known = Watched(storage.known)
            found.append((ref, watched))
    return found


def storage_of(tensor: torch.Tensor | None) -> MetaStorage | None:
    storage = None if tensor is None or tensor.layout is not torch.strided else find_storage(tensor)
    return storage if isinstance(storage, MetaStorage) else None


_watch_lock = threading.RLock()
hold_over_forks(_watch_lock)


def watch_attribute(cls: type, name: str, tell_at: Mapping[int, Callable[[Any], object]]) -> Callable[[], object]:
    """Call what ``tell_at`` has for the id of a module of a class, with the value, where an attribute is read that the
    module itself holds. The result ends that; other threads may watch the same attribute.
    """
    with _watch_lock:
        default = getattr_static(cls, name, MISSING)
        if type(default) is not _WatchedAttribute and hasattr(type(default), "__set__"):
            return lambda: None  # such a default comes before what instances hold already
        watched = vars(cls).get(name)
        if type(watched) is not _WatchedAttribute:
            watched = _WatchedAttribute(cls, name, default)
            setattr(cls, name, watched)
        watched.told.append(tell_at)
        return partial(watched.end, tell_at)


def unwatched(value: Any) -> Any:
    """A value that a class holds; in the place of one whose reads are watched, the value that it held before."""
    if type(value) is not _WatchedAttribute:
        return value
    return value.default if value.is_own else MISSING


class _WatchedAttribute(property):
    """An attribute of a class whose reads are told. With the `property` protocol it comes before what an instance
    holds, so nothing else of an instance changes, and modules elsewhere find what they hold.
    """

    def __init__(self, cls: type, name: str, default: Any) -> None:
        super().__init__(self._read, self._write, self._delete)
        self.cls, self.name, self.is_own = cls, name, name in vars(cls)
        self.default: Any = default.default if type(default) is _WatchedAttribute else default
        self.told: list[Mapping[int, Callable[[Any], object]]] = []

    def end(self, tell_at: Mapping[int, Callable[[Any], object]]) -> None:
        with _watch_lock:
            self.told = [other for other in self.told if other is not tell_at]
            if self.told or vars(self.cls).get(self.name) is not self:
                return
            if self.is_own:
                setattr(self.cls, self.name, self.default)
            else:
                delattr(self.cls, self.name)

    def _read(self, module: Any) -> Any:
        held, name, default = module.__dict__, self.name, self.default
        if name not in held:
            if default is MISSING:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            return default.__get__(module, type(module)) if hasattr(default, "__get__") else default
        for tell_at in self.told:
            if (tell := tell_at.get(id(module))) is not None:
                tell(held[name])
        return held[name]

    def _write(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value

    def _delete(self, module: Any) -> None:
        del module.__dict__[self.name]
