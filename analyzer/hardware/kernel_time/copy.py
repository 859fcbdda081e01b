"""Time of copies between host and device."""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

from .constants import find_constants
from .estimate import KernelTime
from .memory_bound import FAMILY

#: Seconds before a transfer starts: the driver sets up the copy engine (4 us from pinned memory, 8 to 10 from pageable
#: memory: nvbandwidth and bandwidthTest of the CUDA samples at their smallest sizes).
TRANSFER_SECONDS = 8e-6


def host_copy_time(nbytes: int, device: DeviceSpec, pinned: bool = False) -> KernelTime | None:
    """Seconds of a copy over PCI Express. Pageable memory goes through a pinned buffer that the host fills, which
    halves the rate. None where the link's bandwidth is unknown.

    >>> from analyzer.hardware import find_device
    >>> h100 = find_device("h100")
    >>> host_copy_time(2**30, h100, pinned=True).seconds < host_copy_time(2**30, h100).seconds
    True
    """
    if device.pcie_bandwidth is None:
        return None
    constants = find_constants(FAMILY, device)
    rate = device.pcie_bandwidth * constants["pinned_fraction" if pinned else "pageable_fraction"]
    work = nbytes / rate
    return KernelTime(TRANSFER_SECONDS + work, constants["host_copy_spread"],
                      "memory" if work > TRANSFER_SECONDS else "latency")
