"""Time of pointwise kernels and of copies that PyTorch does with them.

PyTorch (``ATen/native/cuda/CUDALoops.cuh``) has three kinds. Operands that all lie alike are taken as one row, several
elements a load. Operands of several types are converted element by element. Operands that lie differently (broadcast,
transposed) have each element's address computed, by a division per dimension.
"""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime
from .memory_bound import kernel_time, read_machine

SECTOR_BYTES = 32  #: what memory gives at least, whatever is asked for
#: Assumed: part of a conversion's instructions that addresses computed element by element leave to be waited for.
CONVERT_BESIDE_ADDRESS = 1 / 3


def random_time(elements: int, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """A kernel that draws random numbers, dropout among them: each thread sets up its generator, then draws four at a
    time (``DistributionTemplates.h``, ``Dropout.cu``), which slows the stream. None where the bandwidth is unknown.
    """
    machine = read_machine(device)
    if machine is None:
        return None
    if elements == 0:
        return NO_TIME
    time = kernel_time(machine, nbytes / machine.constants["random_fraction"])
    return KernelTime(time.seconds + machine.constants["random_latencies"] * machine.latency, time.spread, time.bound)


def cast_time(elements: int, nbytes: float, device: DeviceSpec, converts: bool) -> KernelTime | None:
    """A copy into another type of what lies alike. ``converts``: element by element, not as it loads and stores."""
    time = pointwise_time(elements, nbytes, device, converts=converts)
    machine = read_machine(device)
    if time is None or machine is None or elements == 0:
        return time
    return KernelTime(time.seconds + machine.constants["cast_latencies"] * machine.latency, time.spread, time.bound)


def pointwise_time(elements: int, nbytes: float, device: DeviceSpec, *, instructions: float = 0.0, dimensions: int = 1,
                   operands: int = 2, converts: bool = False) -> KernelTime | None:
    """A pointwise kernel over ``elements`` that moves ``nbytes``.

    ``instructions`` are those of the function, per element. ``dimensions`` are those left after joining such as follow
    each other in all ``operands`` (results included): 1 if all lie alike. ``converts``: they have several types.
    None where the device's bandwidth is unknown.

    A row that is added to each of many takes addresses; a sum of two like tensors does not:

    >>> from analyzer.hardware import find_device
    >>> h200, n = find_device("h200"), 4096 * 3072
    >>> alike = pointwise_time(n, 3 * n * 2, h200, operands=3)
    >>> row = pointwise_time(n, 2 * n * 2, h200, operands=3, dimensions=2)
    >>> alike.seconds < row.seconds, row.bound
    (True, 'arithmetic')
    """
    machine = read_machine(device)
    if machine is None:
        return None
    if elements == 0:
        return NO_TIME
    constants = machine.constants
    if dimensions > 1:
        instructions += constants["address_instructions"] + dimensions * (
            constants["dimension_instructions"] + operands * constants["operand_instructions"])
    if converts:  # where addresses are computed anyway, a part of it is there already
        instructions += constants["convert_instructions"] * operands / (
            2 if dimensions == 1 else 2 / CONVERT_BESIDE_ADDRESS)
    time = kernel_time(machine, nbytes, elements * instructions)
    if dimensions == 1:
        return time
    return KernelTime(time.seconds + constants["address_latencies"] * machine.latency, time.spread, time.bound)


def joined_dimensions(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """How many dimensions are left after joining neighbours that every operand walks through evenly.

    ``strides``: of each operand, in elements, the result first; what is broadcast has stride 0. As TensorIterator does
    (``reorder_dimensions``, ``coalesce_dimensions`` in ``ATen/TensorIterator.cpp``), fastest dimension of the result
    first.

    >>> joined_dimensions((8, 512, 768), [(393216, 768, 1), (393216, 768, 1)])
    1
    >>> joined_dimensions((8, 512, 768), [(393216, 768, 1), (0, 768, 1)])  # 512 and 768 join
    2
    >>> joined_dimensions((4, 32, 512, 64), [(1048576, 32768, 64, 1), (1048576, 64, 2048, 1)])
    4
    """
    order = sorted((i for i, size in enumerate(sizes) if size > 1), key=lambda i: [s[i] for s in strides])
    left = 0
    last = -1
    for i in order:
        if last < 0 or any(s[last] * sizes[last] != s[i] for s in strides):
            left += 1
        last = i
    return max(left, 1)


def scattered_bytes(elements: int, itemsize: int, step: int) -> int:
    """Bytes that memory gives for elements that lie ``step`` elements apart: whole sectors."""
    return elements * min(SECTOR_BYTES, max(step, 1) * itemsize)
