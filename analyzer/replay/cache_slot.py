"""Blocks that fill one slot of a key-value cache of the library transformers.

The index of the slot, in which blocks differ, does not keep one from standing for another that only fills its own,
empty slot: where a block is watched it is an `Index`, which tells if it is used otherwise.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.replacement import replace
from analyzer.record.tensor_walk import walk_modules

from .match import NotRepeated


class Filled(NamedTuple):
    """A slot of a cache that a block filled; of the tensors that it held before, name -> number of the storage."""

    cache: Any
    slot: int
    held: dict[str, int]


class Index:
    """An integer that may be the index of a block's slot. A slot that it fills is in ``filled``; ``tell`` is called
    where anything else asks for its value, and ``used`` is set.
    """

    def __init__(self, value: int, tell: Callable[[], object] = lambda: None,
                 filled: list[Filled] | None = None) -> None:
        self.value, self.used, self._tell = value, False, tell
        self.filled = [] if filled is None else filled

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


def _asking(name: str) -> Any:
    def method(self: Index, *args: Any) -> Any:
        self.used = True
        self._tell()
        return getattr(self.value, name)(*[a.value if type(a) is Index else a for a in args])

    return method


for _name in (
        "eq ne lt le gt ge hash bool int float index add radd sub rsub mul rmul floordiv rfloordiv truediv "
        "rtruediv mod rmod divmod rdivmod pow rpow neg pos abs invert and rand or ror xor rxor lshift rlshift "
        "rshift rrshift round trunc floor ceil str repr format complex").split():
    if hasattr(int, f"__{_name}__"):
        setattr(Index, f"__{_name}__", _asking(f"__{_name}__"))


class SlotFlags(dict[int, Any]):
    """What an `EncoderDecoderCache` has in ``is_updated``: slot -> whether it is filled."""

    def __getitem__(self, slot: Any) -> Any:
        return super().__getitem__(slot.value if type(slot) is Index else slot)

    def get(self, slot: Any, default: Any = None) -> Any:
        return super().get(slot.value if type(slot) is Index else slot, default)

    def __setitem__(self, slot: Any, value: Any) -> None:
        if type(slot) is Index:
            slot.filled.append(Filled(self, slot.value, {}))
        super().__setitem__(slot.value if type(slot) is Index else slot, value)


def find_layer(cache: Any, slot: int) -> type | None:
    """The class of a slot that a block may fill for others; None where it, or the cache, is of another kind."""
    library: Any = sys.modules.get("transformers.cache_utils")
    if library is None or type(cache) is not library.DynamicCache or cache.offloading:
        return None
    layer = type(cache.layers[slot]) if slot < len(cache.layers) else cache.layer_class_to_replicate
    return layer if layer in (library.DynamicLayer, getattr(library, "DynamicSlidingWindowLayer", None)) else None


def is_free(cache: Any, slot: int) -> bool:
    """Whether nothing is in a slot yet."""
    return slot >= len(cache.layers) or not cache.layers[slot].is_initialized


def numbers_held(cache: Any, slot: int) -> dict[str, int]:
    """Of the tensors that a slot holds, name -> number of the storage: the size of a window is one, before any key."""
    if not isinstance(getattr(cache, "layers", None), list) or slot >= len(cache.layers):
        return {}
    with torch._C.DisableTorchFunction():
        storages = {name: value.untyped_storage() for name, value in vars(cache.layers[slot]).items()
                    if isinstance(value, torch.Tensor)}
    return {name: storage.number for name, storage in storages.items() if isinstance(storage, MetaStorage)}


def list_counting(blocks: Sequence[nn.Module], places: Iterable[tuple[str, str]],
                  members: int = 1) -> list[tuple[str, str]]:
    """Of attributes of alike blocks, the integers that count modules, of which each block has so many ``members``."""
    found = []
    for path, name in sorted(places):
        values = [vars(block.get_submodule(path))[name] for block in blocks]
        if all(type(value) is int for value in values) and len(
                {value - place * members for place, value in enumerate(values)}) == 1:
            found.append((path, name))
    return found


@contextmanager
def noting_slots(module: nn.Module, candidates: list[tuple[str, str]],
                 tell: Callable[[str, str], object] = lambda path, name: None) -> Iterator[list[Filled]]:
    """Put an `Index` into each of the attributes meanwhile; what it gives has the slots that caches fill by one."""
    library: Any = sys.modules.get("transformers.cache_utils")
    modules = dict(walk_modules(module)) if candidates else {}
    filled: list[Filled] = []
    indices = {(path, name): Index(modules[path].__dict__[name], partial(tell, path, name), filled)
               for path, name in (candidates if library is not None else ())}
    with ExitStack() as stack:
        if indices:
            stack.callback(replace(library.Cache, "update", _taking_index))
            stack.callback(replace(library.Cache, "get_seq_length", _measuring))
            stack.callback(replace(library.EncoderDecoderCache, "__init__", _flagging))
        for (path, name), index in indices.items():
            stack.callback(modules[path].__dict__.__setitem__, name, index.value)
            modules[path].__dict__[name] = index
        yield filled


def _taking_index(original: Any) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        if type(layer_idx) is Index and find_layer(self, layer_idx.value) is not None:
            layer_idx.filled.append(Filled(self, layer_idx.value, numbers_held(self, layer_idx.value)))
            layer_idx = layer_idx.value
        return original(self, key_states, value_states, layer_idx, *args, **kwargs)
    return update


def _measuring(original: Any) -> Any:
    """How much is in a slot, where that is the same for every block: in one that is free, or that the block filled."""
    def get_seq_length(self: Any, layer_idx: Any = 0) -> Any:
        is_known = type(layer_idx) is Index and find_layer(self, layer_idx.value) is not None and (
            is_free(self, layer_idx.value) or any(filled.cache is self for filled in layer_idx.filled))
        return original(self, layer_idx.value if is_known else layer_idx)
    return get_seq_length


def _flagging(original: Any) -> Any:
    def __init__(self: Any, *caches: Any) -> None:
        original(self, *caches)
        self.is_updated = SlotFlags(self.is_updated)
    return __init__


def fill_as(filled: Filled, index: int, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Fill another slot with what a slot holds, with what ``stand_in`` gives for each of its new tensors. Raises
    NotRepeated where it is not free.
    """
    cache, slot = filled.cache, filled.slot
    if isinstance(cache, SlotFlags) and not cache.get(index):
        cache[index] = cache[slot]
        return
    layer = find_layer(cache, slot)
    if layer is None or find_layer(cache, index) is not layer or not is_free(cache, index):
        raise NotRepeated("a cache holds something of blocks that are not run")
    numbers = numbers_held(cache, slot)
    contents = {name: stand_in(value) if isinstance(value, torch.Tensor) else value
                for name, value in vars(cache.layers[slot]).items()
                if name not in filled.held or filled.held[name] != numbers.get(name)}
    while len(cache.layers) <= index:
        cache.layers.append(layer())
    vars(cache.layers[index]).update(contents)
