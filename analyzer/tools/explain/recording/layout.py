"""The segments as they were when recording began, put into a simulated allocator: segments that came since are taken
out, those that went are put back, and blocks lie where they lay.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analyzer.memory.allocator import Block, CachingAllocator
from analyzer.memory.allocator_options import SMALL_SEGMENT_BYTES
from analyzer.memory.allocator_segment import Pool, Segment, Span

from .history import History
from .snapshot import ACTION

_CHUNK = SMALL_SEGMENT_BYTES  # expandable segments grow by multiples of this
_RANGE_BYTES = 1 << 40  # of addresses behind what an expandable segment has mapped, which it can grow into


@dataclass
class _Range:
    """Contiguous addresses that are mapped: a segment, or a part of an expandable one."""

    start: int
    end: int
    stream: int
    is_small: bool
    is_expandable: bool


def lay_out(allocator: CachingAllocator, history: History, streams: Sequence[int]) -> dict[int, Block]:
    """Put what was there before the first event into an allocator that is empty; the blocks by their number in the
    history. ``streams`` are those of the blocks, private pools with numbers of their own.
    """
    ranges = _start_ranges(history)
    start = history.at(-1)
    order = start[np.argsort(history.address[start], kind="stable")]
    addresses, number_of = history.address[order], {int(history.address[block]): int(block) for block in order}
    sizes = dict(zip(history.memory.blocks.address.tolist(), history.memory.blocks.bytes.tolist()))
    groups: dict[tuple[int, bool], list[_Range]] = {}
    segments: list[Segment] = []
    spans_of: dict[int, list[tuple[int, int, int | None]]] = {}
    for one in ranges:
        inside = order[np.searchsorted(addresses, one.start):np.searchsorted(addresses, one.end)].tolist()
        if inside:
            one.stream = streams[inside[0]]  # of a private pool, its number
        spans_of[one.start] = _cut(allocator, history, one, inside, sizes)
        if one.is_expandable:
            groups.setdefault((one.stream, one.is_small), []).append(one)
        else:
            pool = Pool(allocator, allocator.options, one.stream, one.is_small)
            segments.append(_link(Segment(one.start, 0, pool, None), [(*span, True) for span in spans_of[one.start]]))
    for (stream, is_small), parts in groups.items():
        segments.append(_join(allocator, stream, is_small, parts, spans_of))
    blocks = {}
    for span in allocator.take_segments(segments):
        blocks[number_of[span.address]] = allocator.block_of(span, span.segment.pool.stream)
    allocator.reserved_bytes = sum(one.end - one.start for one in ranges)
    allocated, requested = sum(block.bytes for block in blocks.values()), sum(
        block.requested_bytes for block in blocks.values())
    allocator.usage = allocated, allocated, requested, requested
    return blocks


def _start_ranges(history: History) -> list[_Range]:
    """Undo the events of segments, the last first."""
    events, segments = history.memory.events, history.memory.segments
    whole: dict[int, _Range] = {}
    chunks: dict[int, _Range] = {}
    for number in range(len(segments)):
        one = _Range(int(segments.address[number]), int(segments.address[number] + segments.bytes[number]),
                     int(segments.stream[number]), not segments.is_large[number], bool(segments.is_expandable[number]))
        if one.is_expandable:
            chunks.update(_split(one))
        else:
            whole[one.start] = one
    for event in np.flatnonzero(events.of("segment_alloc", "segment_free", "segment_map", "segment_unmap"))[::-1]:
        start, size = int(events.address[event]), int(events.bytes[event])
        action, stream = int(events.action[event]), int(events.stream[event])
        if action == ACTION["segment_alloc"]:
            whole.pop(start, None)
        elif action == ACTION["segment_free"]:  # a segment of the small pool is the only one of 2 MiB
            whole[start] = _Range(start, start + size, stream, size == SMALL_SEGMENT_BYTES, False)
        elif action == ACTION["segment_map"]:
            for chunk in range(start, start + size, _CHUNK):
                chunks.pop(chunk, None)
        else:
            is_small = size % (10 * SMALL_SEGMENT_BYTES) != 0  # pages of 20 MiB are those of the large pool
            chunks.update(_split(_Range(start, start + size, stream, is_small, True)))
    joined: list[_Range] = []
    for start in sorted(chunks):
        one, last = chunks[start], joined[-1] if joined else None
        if last and last.end == one.start and (last.stream, last.is_small) == (one.stream, one.is_small):
            last.end = one.end
        else:
            joined.append(one)
    return sorted([*whole.values(), *joined], key=lambda one: one.start)


def _split(one: _Range) -> dict[int, _Range]:
    return {start: _Range(start, min(start + _CHUNK, one.end), one.stream, one.is_small, True)
            for start in range(one.start, one.end, _CHUNK)}


def _cut(allocator: CachingAllocator, history: History, one: _Range, inside: Sequence[int],
         sizes: dict[int, int]) -> list[tuple[int, int, int | None]]:
    """The spans of a range: address, bytes, bytes asked for or None where free."""
    pool = Pool(allocator, allocator.options, one.stream, one.is_small)
    spans: list[tuple[int, int, int | None]] = []
    at, end = one.start, len(history.memory.events)
    for place, block in enumerate(inside):
        address, requested = int(history.address[block]), int(history.requested[block])
        room = (int(history.address[inside[place + 1]]) if place + 1 < len(inside) else one.end) - address
        if history.died[block] == end and address in sizes:
            size = sizes[address]
        else:  # freed since: its size is not told, but follows from what it asked for and where the next one lies
            size = min(room, allocator.options.rounded_bytes(requested))
            if room - size < pool.min_remainder_bytes:
                size = room
        if address > at:
            spans.append((at, address - at, None))
        spans.append((address, size, requested))
        at = address + size
    if at < one.end:
        spans.append((at, one.end - at, None))
    return spans


def _join(allocator: CachingAllocator, stream: int, is_small: bool, parts: Sequence[_Range],
          spans_of: dict[int, list[tuple[int, int, int | None]]]) -> Segment:
    """One expandable segment of mapped ranges, with what is not mapped between and behind them."""
    pool = Pool(allocator, allocator.options, stream, is_small)
    spans: list[tuple[int, int, int | None, bool]] = []
    at = parts[0].start
    for one in parts:
        if one.start > at:
            spans.append((at, one.start - at, None, False))
        spans += [(*span, True) for span in spans_of[one.start]]
        at = one.end
    spans.append((at, _RANGE_BYTES, None, False))
    return _link(Segment(parts[0].start, 0, pool, pool.page_bytes), spans)


def _link(segment: Segment, spans: Sequence[tuple[int, int, int | None, bool]]) -> Segment:
    last: Span | None = None
    for address, size, requested, is_mapped in spans:
        span = Span(address, size, segment, is_mapped, requested, last)
        if last is None:
            segment.head = span
        else:
            last.next = span
        last = span
    return segment
