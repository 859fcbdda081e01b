"""How long a copy between the host's memory and a device takes."""
from __future__ import annotations

from analyzer.errors import InputError
from analyzer.hardware.device_spec import DeviceSpec

from .constants import find_constants
from .estimate import NO_TIME, KernelTime

_COHERENT_BANDWIDTH = 150e9  # above PCI Express 6.0 x16: NVLink-C2C, whose device reads pageable memory itself


def host_copy_time(nbytes: int, device: DeviceSpec, *, pinned: bool, to_device: bool) -> KernelTime | None:
    """Time of one copy of ``nbytes`` bytes between host and ``device``; None where the bus's bandwidth is unknown.

    The copy engine moves pinned memory at a share of the bus's rate. The driver moves pageable memory through a pinned
    buffer, at what the host copies beside; out of the device it is slower, since the pages of a fresh tensor are
    first touched then. On hosts with NVLink-C2C pageable memory is as good as pinned. Raises InputError for a negative
    size.

    >>> from analyzer.hardware import find_device
    >>> time = host_copy_time(2**30, find_device("h200"), pinned=True, to_device=True)
    >>> f"{time.seconds * 1e3:.1f} ms", time.bound
    ('19.4 ms', 'communication')
    """
    if nbytes < 0:
        raise InputError(f"host_copy_time(nbytes={nbytes}): a size is not negative")
    if device.pcie_bandwidth is None:
        return None
    if nbytes == 0:
        return NO_TIME
    c = find_constants("host_copy", device)
    direction = "to_device" if to_device else "from_device"
    rate, spread = c[f"pinned_{direction}_share"] * device.pcie_bandwidth, c["pinned_spread"]
    if not pinned and device.pcie_bandwidth < _COHERENT_BANDWIDTH:
        rate, spread = min(rate, c[f"pageable_{direction}_bandwidth"]), c["pageable_spread"]
    transfer, latency = nbytes / rate, c["latency_seconds"]
    return KernelTime(latency + transfer, spread, "communication" if transfer > latency else "latency")
