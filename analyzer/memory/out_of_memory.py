"""The error of a simulated device that has no memory left."""
from __future__ import annotations

import torch

from analyzer.errors import AnalyzerError


class DeviceOutOfMemoryError(AnalyzerError, MemoryError, torch.OutOfMemoryError):
    """The simulated device has no memory left for an allocation: code that catches ``torch.cuda.OutOfMemoryError``, or
    looks for "out of memory" in the text of a RuntimeError, meets what it waits for. All attributes are bytes.

    ``requested_bytes`` asked for; ``short_bytes`` missing once all cached segments were given back; ``allocated_bytes``
    and ``reserved_bytes`` at that moment; ``capacity_bytes`` that may be reserved in all.
    """

    def __init__(self, requested_bytes: int, short_bytes: int, allocated_bytes: int, reserved_bytes: int,
                 capacity_bytes: int) -> None:
        unused_bytes = reserved_bytes - allocated_bytes
        super().__init__(
            f"CUDA out of memory. Tried to allocate {requested_bytes:,} bytes, {short_bytes:,} bytes short; of "
            f"{capacity_bytes:,} bytes {allocated_bytes:,} are allocated and {unused_bytes:,} reserved but unused. "
            + ("Fragmentation is the cause; expandable_segments:True avoids most of it" if unused_bytes >= short_bytes
               else "Try a smaller batch, activation checkpointing or a device with more memory"))
        self.requested_bytes = requested_bytes
        self.short_bytes = short_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes

    def __reduce__(self) -> tuple[type[DeviceOutOfMemoryError], tuple[int, ...]]:
        return type(self), (self.requested_bytes, self.short_bytes, self.allocated_bytes, self.reserved_bytes,
                            self.capacity_bytes)
