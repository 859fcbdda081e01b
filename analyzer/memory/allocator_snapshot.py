"""The state of the simulated allocator in the form of ``torch.cuda.memory_snapshot``.

Source: ``snapshot`` in ``c10/cuda/CUDACachingAllocator.cpp``, ``segmentInfoToDict`` in ``torch/csrc/cuda/Module.cpp``.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

from .allocator_segment import Segment, Span


class SpanSnapshot(TypedDict):
    """One block of ``torch.cuda.memory_snapshot``."""

    address: int
    size: int
    requested_size: int
    state: Literal["active_allocated", "inactive"]
    frames: list[dict[str, object]]


class SegmentSnapshot(TypedDict):
    """One segment of ``torch.cuda.memory_snapshot``."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    frames: list[dict[str, object]]
    blocks: list[SpanSnapshot]


def snapshot_segments(segments: Iterable[Segment], device: int) -> list[SegmentSnapshot]:
    """One entry per contiguous mapped range, by address."""
    entries = []
    for segment in segments:
        entry: SegmentSnapshot | None = None
        span: Span | None = segment.head
        while span is not None:
            if not span.is_mapped:
                entry = None
            else:
                if entry is None:
                    entry = _begin_entry(segment, span.address, device)
                    entries.append(entry)
                _add_to_entry(entry, span)
            span = span.next
    return sorted(entries, key=lambda entry: entry["address"])


def _begin_entry(segment: Segment, address: int, device: int) -> SegmentSnapshot:
    return {
        "device": device, "address": address, "total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0,
        "stream": segment.pool.stream, "segment_type": "small" if segment.pool.is_small else "large", "segment_pool_id": (0, 0),
        "is_expandable": segment.page_bytes is not None, "frames": [], "blocks": [],
    }


def _add_to_entry(entry: SegmentSnapshot, span: Span) -> None:
    entry["total_size"] += span.size_bytes
    if span.requested_bytes is not None:
        entry["allocated_size"] += span.size_bytes
        entry["active_size"] += span.size_bytes
        entry["requested_size"] += span.requested_bytes
    entry["blocks"].append({
        "address": span.address, "size": span.size_bytes, "requested_size": span.requested_bytes or 0,
        "state": "inactive" if span.requested_bytes is None else "active_allocated", "frames": [],
    })
