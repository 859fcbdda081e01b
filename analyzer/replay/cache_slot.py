"""Blocks that fill one slot of a key-value cache of the library transformers.

The index of the slot, in which blocks differ, does not keep one from standing for another that only fills its own,
empty slot: where a block is watched it is an `Index`, which tells if it is used otherwise.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from analyzer.meta.intercept.replacement import replace
from analyzer.record.tensor_walk import walk_modules

from .match import Mismatch


class Index:
    """An integer that may be the index of a block's slot. A cache of which it fills one is in ``filled``, with the
    slot; ``tell`` is called where anything else asks for its value, and ``used`` is set.
    """

    def __init__(self, value: int, tell: Callable[[], object] = lambda: None,
                 filled: list[tuple[Any, int]] | None = None) -> None:
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
            slot.filled.append((self, slot.value))
        super().__setitem__(slot.value if type(slot) is Index else slot, value)


def find_layer(value: Any) -> type | None:
    """The class of the slots of a cache that blocks may fill for each other; None where ``value`` is no such cache."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or type(value) is not library.DynamicCache or value.offloading:
        return None
    layer = value.layer_class_to_replicate or (type(value.layers[0]) if value.layers else None)
    return layer if layer is library.DynamicLayer else None


def is_free(cache: Any, index: int, layer: type) -> bool:
    """Whether nothing is in the slot yet, and it will be of that class."""
    if index < len(cache.layers):
        return type(cache.layers[index]) is layer and not cache.layers[index].is_initialized
    return cache.layer_class_to_replicate is layer


def list_counting(blocks: Sequence[nn.Module], places: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of attributes of alike blocks, the integers in which each block has one more than the block before it."""
    found = []
    for path, name in sorted(places):
        values = [vars(block.get_submodule(path))[name] for block in blocks]
        if all(type(value) is int for value in values) and len({v - place for place, v in enumerate(values)}) == 1:
            found.append((path, name))
    return found


@contextmanager
def noting_slots(module: nn.Module, candidates: list[tuple[str, str]],
                 tell: Callable[[str, str], object] = lambda path, name: None
                 ) -> Iterator[tuple[dict[tuple[str, str], Index], list[tuple[Any, int]]]]:
    """Put an `Index` into each of the attributes meanwhile. Where a cache takes one for its value, the cache and the
    value are in the list.
    """
    library: Any = sys.modules.get("transformers.cache_utils")
    modules = dict(walk_modules(module)) if candidates else {}
    filled: list[tuple[Any, int]] = []
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
        yield indices, filled


def _taking_index(original: Any) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        if type(layer_idx) is Index and find_layer(self) is not None:
            layer_idx.filled.append((self, layer_idx.value))
            layer_idx = layer_idx.value
        return original(self, key_states, value_states, layer_idx, *args, **kwargs)
    return update


def _measuring(original: Any) -> Any:
    """How much is in a slot, where that is the same for every block: in one that is free, or that the block filled."""
    def get_seq_length(self: Any, layer_idx: Any = 0) -> Any:
        layer = find_layer(self) if type(layer_idx) is Index else None
        is_known = layer is not None and (is_free(self, layer_idx.value, layer) or any(
            cache is self for cache, _ in layer_idx.filled))
        return original(self, layer_idx.value if is_known else layer_idx)
    return get_seq_length


def _flagging(original: Any) -> Any:
    def __init__(self: Any, *caches: Any) -> None:
        original(self, *caches)
        self.is_updated = SlotFlags(self.is_updated)
    return __init__


def fill_as(cache: Any, slot: int, index: int, stand_in: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> None:
    """Fill another slot with what a slot holds, with what ``stand_in`` gives for its tensors. Raises Mismatch where it
    is not free.
    """
    if isinstance(cache, SlotFlags) and not cache.get(index):
        cache[index] = cache[slot]
        return
    layer = find_layer(cache)
    if layer is None or not is_free(cache, index, layer):
        raise Mismatch("a cache holds something of blocks that are not run")
    contents = {name: stand_in(value) if isinstance(value, torch.Tensor) else value
                for name, value in vars(cache.layers[slot]).items()}
    while len(cache.layers) <= index:
        cache.layers.append(layer())
    vars(cache.layers[index]).update(contents)
