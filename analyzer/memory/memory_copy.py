"""A second memory in the state of a first: what is replayed from there changes nothing here."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from .allocator import CachingAllocator
from .allocator_segment import Span

T = TypeVar("T")
_LINKS = ("segment", "prev", "next")


def copy_with_memory(value: T, allocators: Mapping[int, CachingAllocator]) -> T:
    """A deep copy of ``value``, which holds allocators and blocks of them. Spans are in chains as long as there are
    storages, so they are copied one by one.
    """
    memo: dict[int, Any] = {}
    pairs: list[tuple[Span, Span]] = []
    for allocator in allocators.values():
        for pool in allocator._pools():
            pool.spare.clear()  # merged spans that would be used again
        for segment in allocator._segments.values():
            span: Span | None = segment.head
            while span is not None:
                pairs.append((span, copy.copy(span)))
                memo[id(span)] = pairs[-1][1]
                span = span.next
    for original, copied in pairs:
        for name in _LINKS:
            setattr(copied, name, copy.deepcopy(getattr(original, name), memo))
    return copy.deepcopy(value, memo)
