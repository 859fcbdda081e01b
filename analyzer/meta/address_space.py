"""Simulated memory: one caching allocator per claimed accelerator, plain growing addresses for the host."""
from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from analyzer.memory.allocator import AllocatorOptions, Block, CachingAllocator

if TYPE_CHECKING:
    from .storage import MetaStorage

_HOST_BASE = 0x5500_0000_0000    # where Linux puts a process's heap; only has to differ from the accelerators'
_DEVICE_BASE = 0x7F00_0000_0000  # where CUDA's unified addressing puts device memory
_DEVICE_SPAN = 1 << 42           # one accelerator's share of addresses: 4 TiB, more than any holds


class Region(Protocol):
    """A place in memory."""

    address: int
    bytes: int


class HostRegion:
    """Host memory: an address of its own, nothing simulated."""

    __slots__ = ("address", "bytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.bytes = nbytes


class StorageListener(Protocol):
    """Who wants to know of births and deaths of storages."""

    def born(self, storage: MetaStorage) -> None: ...
    def died(self, storage: MetaStorage) -> None: ...


class AddressSpace:
    """The memory of the machine that tensors claim to be on. It outlives the mode as long as a tensor does."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.capacity_bytes = capacity_bytes
        self.allocators: dict[int, CachingAllocator] = {}
        self.listener: StorageListener | None = None
        self.stream = 0
        self._host_top = _HOST_BASE

    def allocator(self, index: int = 0) -> CachingAllocator:
        """The allocator of accelerator ``index``."""
        found = self.allocators.get(index)
        if found is None:
            found = CachingAllocator(self.capacity_bytes, self.options, base_address=_DEVICE_BASE + index * _DEVICE_SPAN)
            self.allocators[index] = found
        return found

    def reserve(self, claim: torch.device, nbytes: int) -> Region:
        if claim.type == "cpu" or claim.type == "meta":
            region = HostRegion(self._host_top, nbytes)
            self._host_top += max(64, -(-nbytes // 64) * 64)  # malloc in PyTorch aligns to 64 bytes: c10/core/alignment.h gAlignment
            return region
        return self.allocator(claim.index or 0).allocate(nbytes, self.stream)

    def give_back(self, claim: torch.device, region: Region) -> None:
        if isinstance(region, Block):
            self.allocator(claim.index or 0).free(region)

    def place(self, storage: MetaStorage) -> None:
        storage.region = self.reserve(storage.claim, storage.nbytes())
        if self.listener is not None:
            self.listener.born(storage)

    def release(self, storage: MetaStorage) -> None:
        if self.listener is not None:
            self.listener.died(storage)
        self.give_back(storage.claim, storage.region)

    def resize(self, storage: MetaStorage) -> None:
        self.release(storage)
        self.place(storage)
