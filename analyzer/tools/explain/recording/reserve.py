"""Why so much is reserved: what of the segments is in use, what is lost to what, and which blocks keep them."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analyzer.memory.allocator_options import MIN_BLOCK_BYTES

from .line import Lines
from .snapshot import DeviceMemory, Ints

_KEEPERS = 8  # lines that keep segments, which are told


@dataclass(frozen=True)
class ReservedPart:
    """A part of what is reserved at the end. The parts add up to it."""

    name: str
    bytes: int
    segments: int | None = None  #: that have such bytes; None where that says nothing


@dataclass(frozen=True)
class Keeper:
    """Segments that the largest block of a line keeps from the driver: ``free_bytes`` of them are in no use."""

    line: str
    segments: int
    bytes: int
    free_bytes: int
    block_bytes: int  #: of all blocks in them


def split_reserved(memory: DeviceMemory) -> list[ReservedPart]:
    """What is reserved at the end, by what it is for or lost to."""
    segments, blocks = memory.segments, memory.blocks
    live = blocks.is_live
    held = _sum(memory, blocks.bytes * live)
    free = segments.bytes - held
    rounded = -(-blocks.requested // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    is_idle, is_private = held == 0, np.array([pool != (0, 0) for pool in segments.pool], bool)
    streams, counts = np.unique(segments.stream[~is_private], return_counts=True)
    main = streams[counts.argmax()] if len(streams) else 0
    is_other = (segments.stream != main) & ~is_private
    is_small = ~segments.is_large & ~is_other & ~is_private
    is_large = segments.is_large & ~is_other & ~is_private

    def part(name: str, chosen: Ints) -> ReservedPart:
        return ReservedPart(name, int(free[chosen > 0].sum()), int(((chosen > 0) & (free > 0)).sum()))

    parts = [ReservedPart("held, as it was asked for", int(blocks.requested[live].sum())),
             ReservedPart("rounding to 512 bytes", int(np.maximum(rounded - blocks.requested, 0)[live].sum())),
             ReservedPart("blocks larger than asked for", int((blocks.bytes - rounded)[live].sum())),
             part("idle segments, which empty_cache() gives back", is_idle & ~is_private),
             part("private pools (CUDA graphs), not in use", is_private),
             part("pieces between blocks of other streams", is_other & ~is_idle),
             part("pieces between small blocks (up to 1 MiB)", is_small & ~is_idle),
             part("pieces between large blocks", is_large & ~is_idle)]
    return [part for part in parts if part.bytes]


def _sum(memory: DeviceMemory, values: Ints) -> Ints:
    """The sum of each segment's blocks."""
    found = np.zeros(len(memory.segments), np.int64)
    np.add.at(found, memory.blocks.segment, values)
    return found


def list_keepers(memory: DeviceMemory, lines: Lines) -> list[Keeper]:
    """The lines whose blocks keep segments with the most unused bytes; each segment counts for its largest block."""
    segments, blocks = memory.segments, memory.blocks
    live = np.flatnonzero(blocks.is_live)
    by_size = live[np.argsort(blocks.bytes[live], kind="stable")]
    largest = np.full(len(segments), -1)
    largest[blocks.segment[by_size]] = by_size  # the last one written is the largest
    held = _sum(memory, blocks.bytes * blocks.is_live)
    found: dict[str, Keeper] = {}
    for segment in np.flatnonzero((held > 0) & (held < segments.bytes)).tolist():
        line = str(lines.of(int(blocks.stack[largest[segment]]), is_recorded=False))
        old = found.get(line, Keeper(line, 0, 0, 0, 0))
        size, used = int(segments.bytes[segment]), int(held[segment])
        found[line] = Keeper(line, old.segments + 1, old.bytes + size, old.free_bytes + size - used,
                             old.block_bytes + used)
    return sorted(found.values(), key=lambda keeper: -keeper.free_bytes)[:_KEEPERS]
