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


def mapped_ranges(segments: Iterable[Segment]) -> list[list[Span]]:
    """The spans of ``segments``, those of each contiguous mapped range together, by address."""
    ranges: list[list[Span]] = []
    for segment in segments:
        is_open = False
        span: Span | None = segment.head
        while span is not None:
            if span.is_mapped:
                if not is_open:
                    ranges.append([])
                ranges[-1].append(span)
            is_open = span.is_mapped
            span = span.next
    return sorted(ranges, key=lambda spans: spans[0].address)


def snapshot_segments(segments: Iterable[Segment], device: int) -> list[SegmentSnapshot]:
    """One entry per contiguous mapped range, by address."""
    entries = []
    for spans in mapped_ranges(segments):
        entry = _begin_entry(spans[0].segment, spans[0].address, device)
        for span in spans:
            _add_to_entry(entry, span)
        entries.append(entry)
    return entries


def _begin_entry(segment: Segment, address: int, device: int) -> SegmentSnapshot:
    return {
        "device": device, "address": address, "total_size": 0, "allocated_size": 0, "active_size": 0,
        "requested_size": 0, "stream": segment.pool.stream,
        "segment_type": "small" if segment.pool.is_small else "large", "segment_pool_id": (0, 0),
        "is_expandable": segment.page_bytes is not None, "frames": [], "blocks": []}


def _add_to_entry(entry: SegmentSnapshot, span: Span) -> None:
    entry["total_size"] += span.size_bytes
    if span.requested_bytes is not None:
        entry["allocated_size"] += span.size_bytes
        entry["active_size"] += span.size_bytes
        entry["requested_size"] += span.requested_bytes
    entry["blocks"].append(
        {"address": span.address, "size": span.size_bytes, "requested_size": span.requested_bytes or 0,
         "state": "inactive" if span.requested_bytes is None else "active_allocated", "frames": []})
