"""What a log says of the memory of one device, at the ends of phases and at the peaks; the devices of its calls."""
from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

from analyzer.memory.allocator import CachingAllocator
from analyzer.memory.segment_memory import Journal
from analyzer.meta.spec import Signature

NO_STEP = -1  #: the step of what is in no step
#: phases in no step: calls that lead to no update; what is computed for several steps, the last time and before
EVALUATION, PREPARATION, EARLIER_PREPARATION = "evaluation", "preparation", "earlier preparation"


@dataclass(slots=True, kw_only=True)
class PhaseMemory:
    """What the allocator of one device said over a part of a phase: at its end, and at the peaks."""

    allocated_bytes: int = 0
    reserved_bytes: int | None = None
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int | None = None
    requested_bytes: int = 0
    peak_requested_bytes: int = 0

    def read(self, memory: Any) -> None:
        """Take over what a memory says at the end of the part."""
        self.allocated_bytes, self.requested_bytes = memory.allocated_bytes, memory.requested_bytes
        self.reserved_bytes = memory.reserved_bytes
        self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_reserved_bytes = memory.lap_peaks()

    def join(self, later: PhaseMemory) -> None:
        """Go on to the end of a ``later`` part of the phase."""
        for name in ("allocated_bytes", "requested_bytes", "reserved_bytes"):
            setattr(self, name, getattr(later, name))
        for name in ("peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes"):
            before, peak = getattr(self, name), getattr(later, name)
            setattr(self, name, before if before is None or peak is None else max(before, peak))


@dataclass(slots=True)
class PhaseRecord(PhaseMemory):
    """What the allocator of the watched device said over a part of one phase, and which calls ran in it."""

    step: int
    phase: str
    first_call: int
    last_call: int = 0                      #: one past the last
    end_event: int = 0
    end_allocator_event: int = 0                        #: how many of `Log.allocator_events` came before its end
    others: dict[str, PhaseMemory] = field(default_factory=dict)  #: of the other devices, where there are several
    block: str = ""                         #: of a script: the block with a name that it ran in
    host_allocated_bytes: int = 0           #: of tensors on the host, at its end
    host_peak_bytes: int = 0

    def extend(self, later: PhaseRecord) -> None:
        """Let the ``later`` part, which follows it, be of it."""
        for name in ("last_call", "end_event", "end_allocator_event"):
            setattr(self, name, getattr(later, name))
        self.join(later)
        self.host_allocated_bytes = later.host_allocated_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, later.host_peak_bytes)
        for device, memory in self.others.items():
            memory.join(later.others[device])


@dataclass
class DeviceLog:
    """What the log says of the memory of one device: of the watched one it is a part of `Log` itself."""

    device: str = ""                         #: the simulated device
    peak_bytes: int = 0                      #: largest allocated_bytes seen
    peak_event: int = 0                      #: the event that reached it
    peak_workspace_bytes: int = 0            #: workspace that was held at that event
    #: the allocator before the first of the allocator's events that is not of what was there already
    memory_at_start: CachingAllocator | None = None
    #: what memory was asked for since ``record_stream`` was called first, each request with its step and how many calls
    #: and requests of streams came before it; and the allocator as it was then
    journal: Journal | None = None
    journal_start: CachingAllocator | None = None


def swap(kind: type, one: Any, other: Any) -> None:
    """Exchange the fields of a kind of record that two objects have."""
    for item in fields(kind):
        mine, theirs = getattr(one, item.name), getattr(other, item.name)
        setattr(one, item.name, theirs)
        setattr(other, item.name, mine)


@functools.cache
def device_index(name: str) -> int:
    """The index of a device by its name; of the host, which has none, -1.

    >>> device_index("cuda:3"), device_index("cpu")
    (3, -1)
    """
    return int(name.partition(":")[2] or -1)


def find_copied(signature: Signature) -> tuple[str, str] | None:
    """From where to where a call copies; None where both are one device, or it is no copy."""
    if signature.op.__name__.partition(".")[0] in ("copy_", "_to_copy") and signature.inputs and signature.outputs:
        source, target = signature.inputs[-1].device, signature.outputs[0].device
        if source != target:
            return source, target
    return None


def find_place(signature: Signature) -> int:
    """The index of the device on whose stream the kernels of a call are: of a copy to another device that of the source
    (``copy_kernel_cuda`` in aten/src/ATen/native/cuda/Copy.cu), else that of what it makes or is given.
    """
    specs = (*signature.inputs[-1:], *signature.outputs, *signature.inputs)
    return max(0, next((device_index(spec.device) for spec in specs if spec.device not in ("cpu", "meta")), 0))
