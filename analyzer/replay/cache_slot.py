"""Blocks that fill one slot of a key-value cache of the library transformers.

The cache, which changes, and the index, in which blocks differ, do not keep a block from being replayed that only fills
its own, empty slot: a capture gets a cache of one slot, and an index that tells if it was used otherwise.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from analyzer.meta.intercept.replacement import replace

from .match import Mismatch


class CacheLike(NamedTuple):
    """A cache among a block's arguments, without the cache."""

    kind: type
    layer: type  #: of its slots


class Index:
    """An integer that may be the index of a block's slot; ``used`` once anything but a cache asked for its value."""

    def __init__(self, value: int) -> None:
        self.value, self.used = value, False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


def _asking(name: str) -> Any:
    def method(self: Index, *args: Any) -> Any:
        self.used = True
        return getattr(self.value, name)(*[a.value if type(a) is Index else a for a in args])

    return method


for _name in (
        "eq ne lt le gt ge hash bool int float index add radd sub rsub mul rmul floordiv rfloordiv truediv "
        "rtruediv mod rmod divmod rdivmod pow rpow neg pos abs invert and rand or ror xor rxor lshift rlshift "
        "rshift rrshift round trunc floor ceil str repr format complex").split():
    if hasattr(int, f"__{_name}__"):
        setattr(Index, f"__{_name}__", _asking(f"__{_name}__"))


class CaptureCache:
    """What a block's capture gets for a cache: it takes the keys and values of one slot, and does nothing else."""

    def __init__(self, like: CacheLike) -> None:
        self._like = like
        self._layer: Any = None
        self._index: Index | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return object.__getattribute__(self, "_like").kind  # type: ignore[no-any-return]

    def update(self, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        """As `DynamicCache.update`, for one index only."""
        if type(layer_idx) is not Index or self._index not in (None, layer_idx) and self._index is not layer_idx:
            raise Mismatch("the index of its cache slot is worked out")
        if self._layer is None:
            self._index, self._layer = layer_idx, self._like.layer()
        return self._layer.update(key_states, value_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who looks for a protocol, as the recorder does
            raise AttributeError(name)
        raise Mismatch(f"it reads {name} of a cache")


class Slot(NamedTuple):
    """What a block does to a cache: which argument it is, the index (module, attribute), what the slot then has."""

    argument: int
    module: int
    attribute: str
    layer: type
    plain: dict[str, Any]
    tensors: list[str]


def like_cache(value: Any) -> CacheLike | None:
    """``value`` as a cache whose slots can be replayed; None where it is no such cache."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or type(value) is not library.DynamicCache or value.offloading:
        return None
    layer = value.layer_class_to_replicate or (type(value.layers[0]) if value.layers else None)
    return CacheLike(type(value), layer) if layer is library.DynamicLayer else None


def is_free(cache: Any, index: int, layer: type) -> bool:
    """Whether nothing is in the slot yet, and it will be of that class."""
    if index < len(cache.layers):
        return type(cache.layers[index]) is layer and not cache.layers[index].is_initialized
    return cache.layer_class_to_replicate is layer


def fill(cache: Any, index: int, layer: type, contents: dict[str, Any]) -> None:
    while len(cache.layers) <= index:
        cache.layers.append(layer())
    vars(cache.layers[index]).update(contents)


def index_candidates(module: nn.Module, other: nn.Module) -> list[tuple[str, str]]:
    """(path, attribute) of the integers in which two alike modules differ."""
    return [(path, name) for (path, mine), theirs in zip(module.named_modules(), other.modules())
            for name, value in vars(mine).items()
            if type(value) is int and type(its := vars(theirs).get(name)) is int and its != value]


def list_counting(blocks: Sequence[nn.Module], places: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of attributes of alike blocks, the integers in which each block has one more than the block before it."""
    found = []
    for path, name in sorted(places):
        values = [vars(block.get_submodule(path))[name] for block in blocks]
        if all(type(value) is int for value in values) and len({v - place for place, v in enumerate(values)}) == 1:
            found.append((path, name))
    return found


@contextmanager
def indexed(module: nn.Module, candidates: list[tuple[str, str]]) -> Iterator[dict[tuple[str, str], Index]]:
    """Put an `Index` into each of the attributes meanwhile; the same one where the values are the same."""
    modules = dict(module.named_modules())
    made = {(path, name): Index(modules[path].__dict__[name]) for path, name in candidates}
    try:
        for (path, name), index in made.items():
            modules[path].__dict__[name] = index
        yield made
    finally:
        for (path, name), index in made.items():
            modules[path].__dict__[name] = index.value


@contextmanager
def noting_slots(module: nn.Module, candidates: list[tuple[str, str]]) -> Iterator[tuple[dict[tuple[str, str], Index],
                                                                                         list[tuple[Any, int]]]]:
    """As `indexed`, where a cache takes such an index for its value; then (cache, value) is in the list."""
    library: Any = sys.modules.get("transformers.cache_utils")
    filled: list[tuple[Any, int]] = []

    def noting(original: Any) -> Any:
        def update(self: Any, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
            if type(layer_idx) is Index and like_cache(self) is not None:
                layer_idx = layer_idx.value
                filled.append((self, layer_idx))
            return original(self, key_states, value_states, layer_idx, *args, **kwargs)
        return update

    with ExitStack() as stack:
        indices = stack.enter_context(indexed(module, candidates if library is not None else []))
        if indices:
            stack.callback(replace(library.Cache, "update", noting))
        yield indices, filled


def fill_as(cache: Any, slot: int, index: int) -> None:
    """Fill another slot with what a slot holds. Raises Mismatch where it is not free."""
    like = like_cache(cache)
    if like is None or not is_free(cache, index, like.layer):
        raise Mismatch("a cache holds something of blocks that are not run")
    fill(cache, index, like.layer, vars(cache.layers[slot]))
