"""An allocator's state kept aside: copies, snapshots, and a journal of requests."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypedDict

from .allocator_segment import Segment, Span

# The state of the simulated allocator in the form of ``torch.cuda.memory_snapshot``.
#
# Source: ``snapshot`` in ``c10/cuda/CUDACachingAllocator.cpp``, ``segmentInfoToDict`` in
# ``torch/csrc/cuda/Module.cpp``.

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
    return [_snapshot_range(spans, device) for spans in mapped_ranges(segments)]


def _snapshot_range(spans: list[Span], device: int) -> SegmentSnapshot:
    segment, live = spans[0].segment, [span for span in spans if span.requested_bytes is not None]
    live_bytes = sum(span.size_bytes for span in live)
    return {
        "device": device, "address": spans[0].address, "total_size": sum(span.size_bytes for span in spans),
        "allocated_size": live_bytes, "active_size": live_bytes,
        "requested_size": sum(span.requested_bytes or 0 for span in live), "stream": segment.pool.stream,
        "segment_type": "small" if segment.pool.is_small else "large", "segment_pool_id": (0, 0),
        "is_expandable": segment.page_bytes is not None, "frames": [],
        "blocks": [{"address": span.address, "size": span.size_bytes, "requested_size": span.requested_bytes or 0,
                    "state": "inactive" if span.requested_bytes is None else "active_allocated", "frames": []}
                   for span in spans]}


# What an allocator is asked for, so that the same can be asked of one that gets blocks back later.

class JournalAction(IntEnum):
    """What was asked for: ``ALLOCATE`` and ``USE`` (``record_stream``) name a stream."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    EMPTY = 3


class JournalEntry(NamedTuple):
    """One request, and where in the run it was made, as the journal was told."""

    action: JournalAction
    place: Any
    address: int = 0
    nbytes: int = 0
    stream: int = 0


class Journal:
    """The requests from one moment on; ``place`` tells where in the run each is made, ``limit_bytes`` is all that the
    allocator may reserve.
    """

    def __init__(self, place: Callable[[], Any], limit_bytes: int | None) -> None:
        self._place, self.limit_bytes = place, limit_bytes
        self.entries: list[JournalEntry] = []

    def allocated(self, address: int, nbytes: int, stream: int) -> None:
        """A block was given."""
        self.entries.append(JournalEntry(JournalAction.ALLOCATE, self._place(), address, nbytes, stream))

    def freed(self, address: int) -> None:
        """A block was given back."""
        self.entries.append(JournalEntry(JournalAction.FREE, self._place(), address))

    def used(self, address: int, stream: int) -> None:
        """``record_stream``: a block is used on another stream than that which it was allocated on."""
        self.entries.append(JournalEntry(JournalAction.USE, self._place(), address, 0, stream))

    def emptied(self) -> None:
        """The cache was emptied."""
        self.entries.append(JournalEntry(JournalAction.EMPTY, self._place()))
