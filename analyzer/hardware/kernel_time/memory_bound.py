"""Time of kernels that stream through memory: pointwise, reductions, norms, copies, gathers, optimizers.

Such a kernel starts, fills the memory system and then moves bytes at what memory really gives, unless its instructions
take longer. High bandwidth memory (HBM) gives more of its data sheet's rate than GDDR, whose one bus turns around
between reads and writes.
"""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

from .constants import find_constants
from .estimate import NO_TIME, KernelTime

FAMILY = "memory_bound"

#: Compute capabilities of NVIDIA's dies with HBM (P100, V100, A100, H100 and H200, B200, B300): the CUDA C++
#: Programming Guide's table of compute capabilities, beside each product's data sheet.
HBM_CAPABILITIES = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)})


def memory_rate(device: DeviceSpec) -> float | None:
    """Bytes per second that a long streaming kernel moves, or None where the device's bandwidth is unknown.

    >>> from analyzer.hardware import find_device
    >>> a100 = find_device("a100_40gb")
    >>> 0.8 < memory_rate(a100) / a100.memory_bandwidth < 1
    True
    """
    if device.memory_bandwidth is None:
        return None
    constants = find_constants(FAMILY, device)
    kind = "hbm_fraction" if device.compute_capability in HBM_CAPABILITIES else "gddr_fraction"
    return device.memory_bandwidth * constants[kind]


def instruction_rate(device: DeviceSpec) -> float | None:
    """Instructions per second of all CUDA cores together: a fused multiply-add is one and counts two FLOPs."""
    peak = device.flops_per_second.fp32
    return None if peak is None else peak / 2


def stream_time(nbytes: float, device: DeviceSpec, instructions: float = 0.0, kernels: int = 1) -> KernelTime | None:
    """Kernels that together move ``nbytes`` bytes to and from memory and execute ``instructions`` in all threads.

    None where a figure that it takes is unknown; no time for no kernel.

    >>> from analyzer.hardware import find_device
    >>> time = stream_time(2**30, find_device("h200"))
    >>> time.bound, 0.22e-3 < time.seconds < 0.28e-3
    ('memory', True)
    >>> stream_time(0, find_device("h200")).bound
    'latency'
    """
    if kernels == 0:
        return NO_TIME
    rate = memory_rate(device)
    if rate is None:
        return None
    constants = find_constants(FAMILY, device)
    floor = kernels * constants["floor_seconds"]
    memory = nbytes / rate
    arithmetic = 0.0
    if instructions:
        speed = instruction_rate(device)
        if speed is None:
            return None
        arithmetic = instructions / speed
    work = max(memory, arithmetic)
    bound = "latency" if work < floor else "memory" if memory >= arithmetic else "arithmetic"
    return KernelTime(floor + work, constants["spread"], bound, kernels)
