"""Specs in, specs out: what an operator returned once is rebuilt without running its kernel again."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.signature import Signature
from analyzer.meta.storage import MetaStorage

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
