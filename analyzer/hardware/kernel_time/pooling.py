"""Time of pooling and resampling, whose kernels compute many addresses for few bytes.

``ATen/native/cuda/DilatedMaxPool2d.cu``, ``AveragePool2d.cu``, ``UpSampleBilinear2d.cu``.
"""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import KernelTime
from .memory_bound import kernel_time, read_machine

BLOCK_THREADS = 1024  #: of the resampling kernel
SINGLE_POSITION = 3   #: times less that threads wait where all their loads are one: assumed


def window_time(elements: int, taps: float, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """A kernel that looks at ``taps`` neighbours for each of ``elements``: pooling forward over its window, backward
    over the windows that hold an element. None where the device's bandwidth is unknown.
    """
    machine = read_machine(device)
    if machine is None:
        return None
    return kernel_time(machine, nbytes, elements * taps * machine.constants["tap_instructions"])


def plane_time(planes: int, positions: int, nbytes: float, device: DeviceSpec,
               source_positions: int = 0) -> KernelTime | None:
    """Bilinear resampling forward: a thread a position goes through all ``planes`` (batch by channels), whose four
    neighbours are one and the same where the source has a single position.
    """
    machine = read_machine(device)
    if machine is None:
        return None
    blocks = -(-positions // BLOCK_THREADS)
    waves = -(-blocks // (machine.multiprocessors * max(machine.resident_threads // BLOCK_THREADS, 1)))
    latencies = machine.constants["plane_latencies"] / (SINGLE_POSITION if source_positions == 1 else 1)
    waiting = waves * planes * latencies * machine.latency
    return kernel_time(machine, nbytes, waiting=waiting)
