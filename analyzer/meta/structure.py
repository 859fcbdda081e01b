"""Containers that models pass tensors in: what is inside, how to reach it, how to make a like one."""
from __future__ import annotations

import copy
import dataclasses
import enum
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.rnn import PackedSequence

from .spec import VALUES

Tensor = torch.Tensor
T = TypeVar("T")

# storages of tensors without data hold what is known of their contents, which is not the user's
_PLAIN = (*VALUES, slice, range, type, type(Ellipsis), torch.UntypedStorage)


class Access(NamedTuple):
    """One step into a container: ``value[key]``, or ``value.key`` where ``attribute``."""

    key: Any
    attribute: bool

    def get(self, value: Any) -> Any:
        return getattr(value, self.key) if self.attribute else value[self.key]

    def __str__(self) -> str:
        return f".{self.key}" if self.attribute else f"[{self.key!r}]"


_UNSET = object()


def read_slot(holder: Any, name: str, otherwise: Any) -> Any:
    """What an attribute is now: asking for it would let a profile work out what it has put off."""
    try:
        return object.__getattribute__(holder, name)
    except AttributeError:
        return otherwise


def children(value: Any) -> list[tuple[Access, Any]]:
    """What a container holds: items, fields of dataclasses, attributes of objects of the user's."""
    if isinstance(value, _PLAIN) or isinstance(value, Tensor):
        return []
    if dataclasses.is_dataclass(value):
        held = [(f.name, read_slot(value, f.name, _UNSET)) for f in dataclasses.fields(value)]
        return [(Access(name, True), one) for name, one in held if one is not _UNSET]
    if isinstance(value, (tuple, list, deque)):
        return [(Access(i, False), v) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return [(Access(k, False), v) for k, v in value.items()]
    if not _is_own(value):
        return []
    slots = {name: one for name in _slots_of(type(value)) if (one := read_slot(value, name, _UNSET)) is not _UNSET}
    attributes, items = {**getattr(value, "__dict__", {}), **slots}, {}
    if isinstance(value, UserDict):
        items = attributes.pop("data")
    return [(Access(k, False), v) for k, v in items.items()] + [(Access(k, True), v) for k, v in attributes.items()]


def is_plain_object(value: Any) -> bool:
    """An object of the user's whose state is its ``__dict__``: a cache of keys and values, a distribution, a batch."""
    return type(getattr(value, "__dict__", None)) is dict and _is_own(value)


def _is_own(value: Any) -> bool:
    return type(value) is SimpleNamespace or not (
        isinstance(value, (nn.Module, type, enum.Enum)) or callable(value) or type(value).__module__.startswith(
            ("builtins", "types", "torch._C", "torch.fx")))


def _slots_of(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for row in slots for name in ((row,) if isinstance(row, str) else row) if name[:2] != "__"]


def find_paths(value: Any, kind: type[T]) -> Iterator[tuple[tuple[Access, ...], T]]:
    """What is of a ``kind`` in nested containers, in order, with the steps to each; a container is entered once."""
    seen: set[int] = set()
    def walk(value: Any, path: tuple[Access, ...]) -> Iterator[tuple[tuple[Access, ...], T]]:
        if isinstance(value, kind):
            yield path, value
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            for access, child in children(value):
                yield from walk(child, (*path, access))
    return walk(value, ())


def tensor_paths(value: Any) -> Iterator[tuple[tuple[Access, ...], Tensor]]:
    return find_paths(value, Tensor)


def tensors_of(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in tensor_paths(value))


def host_tensors(value: Any) -> Iterator[Tensor]:
    """Those that are on the host wherever the rest is: the batch sizes of packed sequences
    (torch/nn/utils/rnn.py, "device and dtype of a PackedSequence").
    """
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, PackedSequence):
            yield value.batch_sizes
        elif not isinstance(value, (*_PLAIN, Tensor)) and id(value) not in seen:
            seen.add(id(value))
            left += [child for _, child in children(value)]


def holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or not isinstance(value, _PLAIN) and next(tensors_of(value), None) is not None


def copy_objects(value: Any, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A deep copy of lists, dicts and plain objects that shares the rest; ``memo`` has each, by id, with its copy."""
    memo = {} if memo is None else memo
    kind = type(value)
    if id(value) in memo:
        return memo[id(value)][1]
    if kind is tuple:
        return tuple([copy_objects(v, memo) for v in value])
    if kind is list or kind is dict:
        new: Any = kind()
        memo[id(value)] = value, new
        if kind is list:
            new.extend([copy_objects(v, memo) for v in value])
        else:
            new.update({k: copy_objects(v, memo) for k, v in value.items()})
        return new
    if isinstance(value, (*_PLAIN, Tensor, tuple, list, dict)) or not is_plain_object(value):
        return value
    new = copy.copy(value)
    memo[id(value)] = value, new
    vars(new).update({k: copy_objects(v, memo) for k, v in vars(value).items()})
    return new


def thaw(value: Any) -> Any:
    """Containers among arguments of nodes, which refuse to be changed, as Python's own."""
    if type(value) is tuple:
        return tuple(map(thaw, value))
    if isinstance(value, immutable_list):
        return list(map(thaw, value))
    return {k: thaw(v) for k, v in value.items()} if type(value) in (dict, immutable_dict) else value


def make_tuple(like: Any, items: Iterable[Any]) -> Any:
    """A tuple of the class of ``like``, made by no constructor of its own, which may check items or take others."""
    if hasattr(type(like), "n_sequence_fields"):  # torch.return_types, in C
        return type(like)(items)
    new: Any = tuple.__new__(type(like), items)
    if hasattr(like, "__dict__"):
        vars(new).update(vars(like))
    return new


def replace_tensors(value: Any, make: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None) -> Any:
    """A copy with every tensor replaced; containers without any are kept, one that is met again is the same again."""
    if isinstance(value, Tensor):
        return make(value)
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if not holds_tensor(value):
        return value
    inside = children(value)
    if isinstance(value, tuple):  # also a named one, or one of torch.return_types
        items = [replace_tensors(v, make, memo) for _, v in inside]
        return make_tuple(value, items)
    new = memo[id(value)] = copy.copy(value)
    for access, child in inside:
        item = replace_tensors(child, make, memo)
        if item is child:
            continue
        if not access.attribute:
            new[access.key] = item
        else:
            object.__setattr__(new, access.key, item)
            if isinstance(new, dict) and access.key in new:  # a dataclass that is a dict as well
                dict.__setitem__(new, access.key, item)
    return new
