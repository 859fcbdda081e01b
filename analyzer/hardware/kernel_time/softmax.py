"""Time of softmax and log-softmax: PyTorch's kernels for short rows, long rows and inner dimensions.

``ATen/native/cuda/SoftMax.cu``: a row of up to 1,024 elements and 4 KiB stays in the registers of a warp. A longer one
has a block, which goes through it three times (the largest, the sum, the result), from shared memory where it fits.
"""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime
from .memory_bound import kernel_time, missed_fraction, read_machine

WARP_ELEMENTS, WARP_BYTES = 1024, 4096  #: of a row that a warp keeps: ``dim_size <= 1024 && dim_size*size <= 4096``
SHARED_BYTES = 48 * 1024                #: that a block has without asking for more
ALIGNED_BYTES = 16                      #: of a vector of shared memory
MAX_THREADS = 1024


def softmax_time(rows: int, columns: int, itemsize: int, device: DeviceSpec, *, written_itemsize: int | None = None,
                 backward: bool = False) -> KernelTime | None:
    """Softmax over rows of which neighbours lie next to each other. Backward reads two tensors, twice where the row is
    long. None where the device's bandwidth is unknown.

    >>> from analyzer.hardware import find_device
    >>> h200 = find_device("h200")
    >>> short, long = (softmax_time(2**28 // n, n, 4, h200).seconds for n in (512, 2**17))
    >>> 1.7 < long / short < 2.1
    True
    """
    machine = read_machine(device)
    if machine is None:
        return None
    if rows * columns == 0:
        return NO_TIME
    row, written = columns * itemsize, columns * (written_itemsize or itemsize)
    tensors = 2 if backward else 1
    nbytes = rows * (tensors * row + written)
    if columns <= WARP_ELEMENTS and row <= WARP_BYTES:
        return kernel_time(machine, nbytes, rows * columns * machine.constants["softmax_instructions"])
    instructions = rows * columns * machine.constants["softmax_instructions"]
    if not backward and row <= SHARED_BYTES - 512 and row % ALIGNED_BYTES == 0:
        return kernel_time(machine, nbytes, instructions)
    threads = 32
    while threads < min(columns * itemsize // ALIGNED_BYTES, MAX_THREADS) // 2:
        threads *= 2
    resident = machine.multiprocessors * min(machine.resident_threads // MAX_THREADS if columns > 2 * MAX_THREADS
                                             else machine.resident_threads // threads, 16)
    again = rows * row * tensors * (1 if backward else 2)
    missed = again * missed_fraction(resident * (tensors * row + written), machine)
    waiting = (nbytes + missed) / machine.rate + (again - missed) / machine.cache_rate
    time = kernel_time(machine, nbytes + missed, instructions, waiting)
    return KernelTime(time.seconds, time.spread, "memory" if time.bound == "latency" and rows > resident
                      else time.bound)


def inner_softmax_time(outer: int, size: int, inner: int, itemsize: int, device: DeviceSpec, *,
                       written_itemsize: int | None = None, backward: bool = False) -> KernelTime | None:
    """Softmax over a dimension whose neighbours lie ``inner`` elements apart: a thread each goes through it, three
    times forward and twice backward, and finds it in the last cache again.
    """
    machine = read_machine(device)
    if machine is None:
        return None
    elements = outer * size * inner
    if elements == 0:
        return NO_TIME
    tensors = 2 if backward else 1
    nbytes = elements * (tensors * itemsize + (written_itemsize or itemsize))
    resident = min(machine.multiprocessors * machine.resident_threads, outer * inner) * size * itemsize * (tensors + 1)
    again = elements * itemsize * tensors * (1 if backward else 2) * missed_fraction(resident, machine)
    return kernel_time(machine, nbytes + again, elements * machine.constants["inner_softmax_instructions"])
