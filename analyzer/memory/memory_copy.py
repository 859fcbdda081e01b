"""A second memory in the state of a first: what is replayed from there changes nothing here."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from .allocator import Block, CachingAllocator
from .allocator_segment import Span

T = TypeVar("T")
_LINKS = ("segment", "prev", "next")


def copy_with_memory(value: T, allocators: Mapping[int, CachingAllocator], memo: dict[int, Any]) -> T:
    """A deep copy of ``value``, which holds allocators and blocks of them. Spans are in chains as long as there are
    storages, so they are copied one by one. ``memo`` is as in `copy.deepcopy`: by id, what is copied already.
    """
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


def copy_of_block(region: Any, memo: Mapping[int, Any]) -> Any:
    """The copy of a place in memory that `copy_with_memory` has copied; places that are no blocks never change."""
    found = memo.get(id(region))
    if found is not None or not isinstance(region, Block):
        return region if found is None else found
    span = None if region._span is None else memo[id(region._span)]
    return Block(region.address, region.requested_bytes, region.bytes, region.stream, span)
