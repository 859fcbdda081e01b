"""What kernels that stream through memory have in common: pointwise, reductions, norms, copies, gathers, optimizers.

Such a kernel starts, fills the memory system and then moves bytes at what memory really gives, unless its instructions
or the latency of its loads take longer. High bandwidth memory (HBM) gives more of its data sheet's rate than GDDR.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .constants import find_constants
from .estimate import KernelTime

FAMILY = "memory_bound"

#: Compute capabilities of NVIDIA's dies with HBM (P100, V100, A100, H100 and H200, B200, B300): the CUDA C++
#: Programming Guide's table of compute capabilities, beside each product's data sheet.
HBM_CAPABILITIES = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)})
#: Resident threads of a multiprocessor by compute capability, 2,048 for all others: the same guide, "Technical
#: Specifications per Compute Capability".
RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
#: Instructions that a multiprocessor issues a cycle, over all threads: four schedulers with a warp of 32 each (the
#: guide's sections on each architecture).
ISSUED_PER_CYCLE = 128
#: Bytes that a multiprocessor takes from the last cache per cycle: half of the port's 64 (whitepaper of the A100).
CACHE_BYTES_PER_CYCLE = 32
#: Part of the last cache that holds different data, where it is not all: the A100's two partitions keep copies of what
#: the multiprocessors next to the other read (its whitepaper, "L2 cache": each partition serves its own GPCs).
DISTINCT_CACHE = {(8, 0): 0.5}
#: Where figures of a device are unknown.
MULTIPROCESSORS, CLOCK_HERTZ, L2_BYTES = 80, 1.5e9, 8 * 2**20


class Machine(NamedTuple):
    """What the models of this family take of a device.

    - ``rate``: bytes per second of a long stream. ``cache_rate``: of data that lies in the last cache.
    - ``issue_rate``: instructions per second over all threads.
    - ``multiprocessors``, ``resident_threads`` (of one multiprocessor), ``l2_bytes``.
    - ``floor``: seconds of a kernel that does nothing. ``latency``: seconds between a load and its data.
    - ``constants``: all that is fitted of the family. ``spread``: see `KernelTime`.
    """

    rate: float
    cache_rate: float
    issue_rate: float
    multiprocessors: int
    resident_threads: int
    l2_bytes: int
    floor: float
    latency: float
    spread: float
    constants: dict[str, float]


@functools.lru_cache(maxsize=64)
def read_machine(device: DeviceSpec) -> Machine | None:
    """The figures of a device, None where its memory's bandwidth is unknown.

    >>> from analyzer.hardware import find_device
    >>> machine = read_machine(find_device("a100_40gb"))
    >>> machine.multiprocessors, 0.8 < machine.rate / 1555e9 < 1
    (108, True)
    """
    if device.memory_bandwidth is None:
        return None
    constants = dict(find_constants(FAMILY, device))
    kind = "hbm_fraction" if device.compute_capability in HBM_CAPABILITIES else "gddr_fraction"
    capability = device.compute_capability or (0, 0)
    cache = (device.l2_bytes or L2_BYTES) * DISTINCT_CACHE.get(capability, 1)
    count = device.multiprocessors or MULTIPROCESSORS
    clock = device.clock_hertz or CLOCK_HERTZ
    return Machine(
        device.memory_bandwidth * constants[kind], count * clock * CACHE_BYTES_PER_CYCLE,
        count * clock * ISSUED_PER_CYCLE, count, RESIDENT_THREADS.get(capability, 2048),
        int(cache), constants["floor_seconds"], constants["latency_seconds"], constants["spread"], constants)


def kernel_time(machine: Machine, nbytes: float, instructions: float = 0.0, waiting: float = 0.0,
                kernels: int = 1) -> KernelTime:
    """Kernels that together move ``nbytes`` and issue ``instructions``, and whose threads wait ``waiting`` seconds for
    loads that follow each other: the longest of the three. Starting a kernel overlaps with its first loads. What waits
    is less certain than what streams.
    """
    memory = nbytes / machine.rate
    arithmetic = instructions / machine.issue_rate
    work = max(memory, arithmetic, waiting)
    floor = kernels * machine.floor
    seconds = math.hypot(floor, work)
    if work < floor or waiting > memory and waiting > arithmetic:
        bound = "latency"
    else:
        bound = "memory" if memory >= arithmetic else "arithmetic"
    spread = machine.constants["latency_spread"] if bound == "latency" else machine.spread
    return KernelTime(seconds, spread, bound, kernels)


def stream_time(nbytes: float, device: DeviceSpec, instructions: float = 0.0, kernels: int = 1) -> KernelTime | None:
    """Kernels that together move ``nbytes`` bytes to and from memory and issue ``instructions`` over all threads.

    None where the device's bandwidth is unknown.

    >>> from analyzer.hardware import find_device
    >>> time = stream_time(2**30, find_device("h200"))
    >>> time.bound, 0.22e-3 < time.seconds < 0.28e-3
    ('memory', True)
    >>> stream_time(0, find_device("h200")).bound
    'latency'
    """
    machine = read_machine(device)
    return None if machine is None else kernel_time(machine, nbytes, instructions, kernels=kernels)


def missed_fraction(resident_bytes: float, machine: Machine) -> float:
    """Part of a second reading that the last cache no longer holds, where what is in work at a time is
    ``resident_bytes``: none well below the cache's size, all well above it.

    >>> from analyzer.hardware import find_device
    >>> machine = read_machine(find_device("a100"))
    >>> [round(missed_fraction(part * machine.l2_bytes, machine), 2) for part in (0.5, 1, 2)]
    [0.03, 0.5, 0.97]
    """
    # assumed: how steep it is; a cache is shared by more than one tensor and is not replaced in order of use
    ratio: float = (resident_bytes / machine.l2_bytes)**5
    return ratio / (1 + ratio)
