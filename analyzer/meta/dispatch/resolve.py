"""A call with its arguments resolved, and what was learned of the same call before."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.argument import adopt_arguments
from analyzer.meta.memory_need import Stage
from analyzer.meta.operator_info import OperatorInfo
from analyzer.meta.spec import Signature, strided_of
from analyzer.meta.state import CPU, MetaState, indexed_device
from analyzer.meta.value.contents import read_known

from .list_memo import ListMemo

# Specs in, specs out: what an operator returned once is rebuilt without running its kernel again.

NEW, VIEW, SAME, VALUE = range(4)


class Recipe:
    """How to make one output: a new storage, a view of an argument, the argument itself, or a plain value."""

    __slots__ = ("kind", "shape", "stride", "dtype", "device", "source", "offset", "value")

    def __init__(self, kind: int, *, shape: Any = None, stride: Any = None, dtype: Any = None, device: Any = None,
                 source: int = 0, offset: int = 0, value: Any = None) -> None:
        self.kind, self.shape, self.stride, self.dtype, self.device = kind, shape, stride, dtype, device
        self.source, self.offset, self.value = source, offset, value


class Entry:
    """One cached call: its signature, a recipe per output, and what holds several: list, tuple, or None for one."""

    __slots__ = ("signature", "recipes", "structure")

    def __init__(self, signature: Signature, recipes: list[Recipe], structure: Any) -> None:
        self.signature, self.recipes, self.structure = signature, recipes, structure


_LARGEST = 1 << 17  # entries; a process that meets more kinds of call than this starts over, to bound memory
entries: dict[Any, Entry] = {}


def remember(key: Any, entry: Entry) -> None:
    """Keep an entry, for the rest of the process as a rule."""
    if len(entries) >= _LARGEST:
        entries.clear()
    entries[key] = entry


def make_recipes(outputs: list[Any], tensors: list[torch.Tensor], storages: list[MetaStorage],
                 fresh: list[MetaStorage | None]) -> list[Recipe] | None:
    """Recipes that give ``outputs`` again, or None where no recipe can."""
    numbers = {s.number: i for i, s in reversed(list(enumerate(storages)))}
    recipes = []
    for out, born in zip(outputs, fresh):
        if not isinstance(out, torch.Tensor):
            if out is not None and not isinstance(out, (int, float, bool)):
                return None
            recipes.append(Recipe(VALUE, value=out))
            continue
        if out.layout is not torch.strided or out.dtype.is_complex or out.is_neg() or out.is_quantized:
            return None
        shape, stride = tuple(out.shape), out.stride()
        if born is not None:
            extent = 0 if out.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
            if out.storage_offset() or born.nbytes() != extent * out.itemsize or out.is_conj():
                return None
            recipes.append(Recipe(NEW, shape=shape, stride=stride, dtype=out.dtype, device=born.device))
            continue
        for i, t in enumerate(tensors):
            if t is out:
                recipes.append(Recipe(SAME, source=i))
                break
        else:
            storage = out.untyped_storage()
            i = numbers.get(storage.number, -1) if isinstance(storage, MetaStorage) else -1
            if i < 0 or tensors[i].dtype != out.dtype or tensors[i].dtype.is_complex:
                return None
            recipes.append(Recipe(VIEW, shape=shape, stride=stride, source=i,
                                  offset=int(out.storage_offset() - tensors[i].storage_offset())))
    return recipes


# Resolve: which tensors go into an operator call, and the key under which calls of its kind are remembered.

Tensor = torch.Tensor


class OperatorCall:
    """One call: what goes in; then, as far as it has come, what comes out and what it holds meanwhile."""

    __slots__ = ("info", "args", "kwargs", "tensors", "storages", "key", "result", "outputs", "born", "signature",
                 "stages", "kept")

    signature: Signature
    result: Any                       #: as the caller gets it
    outputs: list[Any]                #: the parts of the result
    born: list[MetaStorage | None]    #: the new storage of each output, None where it has none
    stages: tuple[Stage, ...]

    def __init__(self, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor],
                 storages: list[MetaStorage], key: list[Any] | None) -> None:
        self.info, self.args, self.kwargs = info, args, kwargs
        self.tensors, self.storages = tensors, storages  #: of the arguments, in order
        self.key = key                                   #: None where no recipe can be made
        self.kept: list[MetaStorage] = []                #: memory that is held until the operator ends

    def written(self) -> Iterator[tuple[tuple[int, ...] | None, Tensor]]:
        """The tensors that the operator writes to, with their places in ``args``; None: in ``kwargs``."""
        for i, name, is_named in self.info.mutated:
            is_given = not is_named and i < len(self.args)
            value = self.args[i] if is_given else self.kwargs.get(name)
            if isinstance(value, Tensor):
                yield (i,) if is_given else None, value
            elif isinstance(value, (list, tuple)):
                for j, t in enumerate(value):
                    if isinstance(t, Tensor):
                        yield (i, j) if is_given else None, t


def resolve(state: MetaState, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall:
    """The call with its tensors, those with data replaced by fake ones."""
    tensors: list[Tensor] = []
    storages: list[MetaStorage] = []
    key: list[Any] = [info, state.pending_device]  # not the operator: torch hashes those in Python
    has_recipe = True
    lists = state.lists
    if not _flatten(args, tensors, storages, key, lists) or kwargs and not _flatten_named(
            kwargs, tensors, storages, key, lists):
        tensors.clear()
        storages.clear()
        key = [info, state.pending_device]
        args, kwargs = adopt_arguments(state, args), adopt_arguments(state, kwargs)
        if not (_flatten(args, tensors, storages, key) and _flatten_named(kwargs, tensors, storages, key)):
            has_recipe = False
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            storages = [s for s in map(storage_of, tensors) if type(s) is MetaStorage]
    if not storages and state.pending_device is None and kwargs.get("device") is not None:
        key.append(result_device(state, storages, kwargs["device"]))  # a factory called by C++ code
    if info.packed:
        key.append(tuple(values_at(args, info.packed)))
    if info.reads_offset and has_recipe:
        key.append(tensors[0].storage_offset())
    return OperatorCall(info, args, kwargs, tensors, storages, key if has_recipe else None)


def values_at(args: tuple[Any, ...], positions: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
    """The integers in the arguments at ``positions``; None where there is no tensor, or its contents are not known."""
    for i in positions:
        known = read_known(args[i]) if i < len(args) and isinstance(args[i], Tensor) else None
        yield None if known is None else tuple(known.tolist())


def storage_of(tensor: Tensor) -> Any:
    """The storage of a tensor of the mode's own, a `MetaStorage`; of a sparse one, that of its values."""
    return strided_of(tensor).untyped_storage()


_FLOATS = {float}


def _flatten(args: Any, tensors: list[Tensor], storages: list[MetaStorage], key: list[Any],
             lists: ListMemo | None = None) -> bool:
    """Collect tensors and the cache key; False where a tensor is not one of the mode's own."""
    for a in args:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                return False
            storage = a.untyped_storage()
            if type(storage) is not MetaStorage:
                return False
            tensors.append(a)
            storages.append(storage)
            key.append(a.shape)
            key.append(a.stride())
            key.append(a.dtype)
            key.append(storage.device)
        elif isinstance(a, (list, tuple)):
            key.append(len(a))
            if a and isinstance(a[0], int):
                key.append(tuple(a))
            elif len(a) > 1 and type(a[0]) is float and set(map(type, a)) == _FLOATS:
                key.append(float)
                key.append(tuple(a))
            elif lists is not None and (kind := lists.take(a, tensors, storages)) is not None:
                key.append(kind)
            elif not _flatten(a, tensors, storages, key, lists):
                return False
        else:
            key.append(type(a))  # 1, 1.0 and True are equal as keys but promote differently
            key.append(a)
    return True


def _flatten_named(kwargs: dict[str, Any], tensors: list[Tensor], storages: list[MetaStorage], key: list[Any],
                   lists: ListMemo | None = None) -> bool:
    for name, value in kwargs.items():
        key.append(name)
        if not _flatten((value,), tensors, storages, key, lists):
            return False
    return True


def result_device(state: MetaState, storages: list[MetaStorage], asked: torch.device | None = None) -> torch.device:
    """The device of new outputs: the one asked for, else the accelerator of any argument, else what C++ code means
    that asks for the device where a tensor really is, else the host.
    """
    if state.pending_device is not None:
        return state.pending_device
    if asked is not None and asked.type != "meta":
        return indexed_device(asked)
    for s in storages:
        if s.device.type != "cpu":
            return s.device
    if asked is not None and not storages:  # asked of meta by C++ code, which sees where a tensor really is
        return state.device_of_options or _accelerator_of(state.arguments) or CPU
    return CPU


def _accelerator_of(args: Any) -> torch.device | None:
    """The accelerator of the first tensor among ``args`` (lists included) that is on one."""
    for a in args:
        if isinstance(a, Tensor):
            storage = find_storage(strided_of(a))
            if type(storage) is MetaStorage and storage.device.type != "cpu":
                return storage.device
        elif isinstance(a, (list, tuple)) and (found := _accelerator_of(a)) is not None:
            return found
    return None
