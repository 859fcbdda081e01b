"""The host's memory, and places that take none."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

from .allocator_segment import Elsewhere, Instruction, Placements, replay_one_by_one

_HOST_BASE = 0x5500_0000_0000    # where Linux puts a process's heap; only has to differ from the accelerators'


@dataclass(slots=True, eq=False)
class HostRegion:
    """A piece of host memory."""

    address: int
    bytes: int


@dataclass(slots=True, eq=False)
class NoRegion:
    """The place of a storage that takes no memory of its own."""

    address: int
    bytes: int


class Unplaced:
    """Addresses from ``top`` down for what an allocator places afterwards: each is given once, none is taken back."""

    def __init__(self, top: int) -> None:
        self._bottom = top

    def allocate(self, nbytes: int) -> NoRegion:
        self._bottom -= nbytes + 512 & -512  # what takes no bytes has an address of its own too
        return NoRegion(self._bottom, nbytes)


class HostMemory:
    """Host memory: addresses that only grow, and counts of what is in use. Nothing is cached, nothing reserved."""

    reserved_bytes = None

    def __init__(self, base: int = _HOST_BASE) -> None:
        self._top = base
        self.observer: Callable[[str, int, int], None] | None = None  #: as `CachingAllocator.observer`
        self.allocated_bytes = self.peak_allocated_bytes = self._lap_peak_bytes = 0

    def allocate(self, nbytes: int) -> HostRegion:
        region = HostRegion(self._top, nbytes)
        # malloc in PyTorch aligns to 64 bytes: c10/core/alignment.h gAlignment
        self._top += max(64, -(-nbytes // 64) * 64)
        self.allocated_bytes += nbytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.allocated_bytes > self._lap_peak_bytes:
            self._lap_peak_bytes = self.allocated_bytes
        if self.observer is not None and nbytes:
            self.observer("alloc", region.address, nbytes)
        return region

    def free(self, region: HostRegion) -> None:
        self.allocated_bytes -= region.bytes
        if self.observer is not None and region.bytes:
            self.observer("free", region.address, region.bytes)

    def copy(self) -> HostMemory:
        """Memory in the same state, with no observer."""
        made = copy(self)
        made.observer = None
        return made

    def rounded_bytes(self, nbytes: int) -> int:
        return nbytes

    def block_of(self, place: Any, stream: int = 0) -> Any:
        return place

    place_of = block_of

    def replay(self, instructions: Iterable[Instruction], slots: list[Any], placements: Placements,
               elsewhere: Elsewhere | None = None, stream: int = 0) -> None:
        before, self.observer = self.observer, None
        try:
            replay_one_by_one(self, instructions, slots, placements, elsewhere)
        finally:
            self.observer = before

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes

    def begin_lap(self) -> None:
        self._lap_peak_bytes = self.allocated_bytes

    def lap_peaks(self) -> tuple[int, int, None]:
        """Allocated, requested and reserved bytes at the peaks of the lap."""
        return self._lap_peak_bytes, self._lap_peak_bytes, None

    @property
    def requested_bytes(self) -> int:
        return self.allocated_bytes
