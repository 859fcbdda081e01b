"""Time of look-ups, scattered sums, sorting and what is built on them.

``ATen/native/cuda/EmbeddingBackwardKernel.cu`` and ``Embedding.cu``, ``Indexing.cu``, ``Sort.cpp``: gradients of
look-ups sort the indices, then sum the rows of each; up to 3,072 indices a kernel without sorting goes through them.
"""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime, join
from .memory_bound import Machine, kernel_time, read_machine

UNSORTED_INDICES = 3072       #: up to which the gradient of an embedding does not sort
INDICES_AT_A_TIME = 32        #: that a block of that kernel adds
ROWS_OF_A_SUM = 10            #: ``NROWS_PER_THREAD``
GRADIENT_KERNELS = 9          #: launches beside sorting: segments, partial sums, their offsets, the sums
RADIX_BITS = 8                #: of a pass of CUB's radix sort
SORT_BYTES = 3                #: times that keys and values move in a pass: counted, read, written


def sort_time(count: int, key_bytes: int, value_bytes: int, device: DeviceSpec, *,
              bits: int | None = None) -> KernelTime | None:
    """CUB's radix sort of ``count`` keys with values: a histogram, then a pass for each 8 bits of the key.

    >>> from analyzer.hardware import find_device
    >>> h200 = find_device("h200")
    >>> sort_time(10**8, 8, 8, h200).seconds > sort_time(10**8, 4, 8, h200).seconds
    True
    """
    machine = read_machine(device)
    return None if machine is None else sorting(count, key_bytes, value_bytes, bits, machine)


def sorting(count: int, key_bytes: int, value_bytes: int, bits: int | None, machine: Machine) -> KernelTime:
    """As `sort_time`."""
    if count == 0:
        return NO_TIME
    passes = -(-(bits or 8 * key_bytes) // RADIX_BITS)
    nbytes = count * (key_bytes + passes * SORT_BYTES * (key_bytes + value_bytes))
    return kernel_time(machine, nbytes, waiting=(passes + 2) * machine.constants["library_seconds"],
                       kernels=passes + 2)


def embedding_backward_time(indices: int, width: int, rows: int, itemsize: int, device: DeviceSpec, *,
                            index_bytes: int = 8) -> KernelTime | None:
    """The gradient of a table of ``rows`` by ``width``: cleared, then what was looked up is added to it.

    >>> from analyzer.hardware import find_device
    >>> h200 = find_device("h200")
    >>> [embedding_backward_time(n, 768, 30522, 4, h200).kernels for n in (2048, 4096)]
    [2, 14]
    """
    machine = read_machine(device)
    if machine is None:
        return None
    table = kernel_time(machine, rows * width * itemsize)
    nbytes = 3 * indices * width * itemsize + indices * index_bytes
    if indices == 0:
        return table
    if indices <= UNSORTED_INDICES:
        steps = -(-indices // INDICES_AT_A_TIME)
        return join([table, kernel_time(machine, nbytes, waiting=steps * machine.constants["index_step_latencies"]
                                        * machine.latency)])
    of_a_row = indices / max(rows, 1) / ROWS_OF_A_SUM  # partial sums that one thread adds, if indices are even
    waiting = GRADIENT_KERNELS * machine.constants["library_seconds"] + of_a_row * machine.latency / 2
    return join([table, sorting(indices, index_bytes, index_bytes, max(rows - 1, 1).bit_length(), machine),
                 kernel_time(machine, nbytes, waiting=waiting, kernels=GRADIENT_KERNELS)])


def gather_rows_time(indices: int, width: int, itemsize: int, device: DeviceSpec) -> KernelTime | None:
    """Rows of a table, copied by a block each where 16 bytes divide them; the device starts so many blocks a second."""
    machine = read_machine(device)
    if machine is None:
        return None
    if indices == 0:
        return NO_TIME
    waiting = 0.0
    if width * itemsize % 16 == 0:
        waiting = indices * machine.constants["block_seconds"] / machine.multiprocessors
    return kernel_time(machine, indices * (2 * width * itemsize + 8), waiting=waiting)


def lone_block_time(loads: int, device: DeviceSpec, latencies: float = 1.0) -> KernelTime | None:
    """A kernel of one block that loads single elements from anywhere, as many at a time as a multiprocessor has under
    way: the losses of few targets. None where the device's bandwidth is unknown.
    """
    machine = read_machine(device)
    if machine is None:
        return None
    waiting = latencies * machine.latency * (1 + min(loads, 1024) / machine.constants["lone_loads"])
    return kernel_time(machine, 32 * loads, waiting=waiting)


def position_loss_time(batch: int, positions: int, device: DeviceSpec) -> KernelTime | None:
    """The loss of each position of images: a block of 1,024 threads an image, more only beyond 131,072 positions
    (``NLLLoss2d.cu``).
    """
    machine = read_machine(device)
    if machine is None:
        return None
    blocks = -(-positions // 1024)
    an_image = max(1, blocks // 128)
    waves = -(-batch * an_image // (2 * machine.multiprocessors))
    waiting = waves * -(-blocks // an_image) * machine.constants["position_latencies"] * machine.latency
    return kernel_time(machine, batch * positions * 40, waiting=waiting)


def atomic_time(additions: int, distinct: int, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """Sums by atomic additions: those to one address follow each other.

    >>> from analyzer.hardware import find_device
    >>> h200 = find_device("h200")
    >>> atomic_time(10**7, 100, 8e7, h200).seconds > atomic_time(10**7, 10**6, 8e7, h200).seconds
    True
    """
    machine = read_machine(device)
    if machine is None:
        return None
    if additions == 0:
        return NO_TIME
    crowding = max(1.0, additions / max(distinct, 1))
    return kernel_time(machine, nbytes, additions * crowding * machine.constants["atomic_instructions"])
