"""Time of kernels that memory bounds: pointwise, gathers, pooling, lists of tensors."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime, find_constants, join, join_known

# What kernels that stream through memory have in common: pointwise, reductions, norms, copies, gathers, optimizers.
# Such a kernel starts, fills the memory system and then moves bytes at what memory really gives, unless its
# instructions or the latency of its loads take longer. High bandwidth memory (HBM) gives more of its rate than GDDR.

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
    """The figures of a device, None where its memory's bandwidth is unknown."""
    if device.memory_bandwidth is None:
        return None
    constants = dict(find_constants(FAMILY, device))
    kind = "hbm_fraction" if device.compute_capability in HBM_CAPABILITIES else "gddr_fraction"
    capability = device.compute_capability or (0, 0)
    cache = (device.l2_bytes or L2_BYTES) * DISTINCT_CACHE.get(capability, 1)
    count = device.multiprocessors or MULTIPROCESSORS
    clock = device.clock_hertz or CLOCK_HERTZ
    return Machine(device.memory_bandwidth * constants[kind], count * clock * CACHE_BYTES_PER_CYCLE,
                   count * clock * ISSUED_PER_CYCLE, count, RESIDENT_THREADS.get(capability, 2048), int(cache),
                   constants["floor_seconds"], constants["latency_seconds"], constants["spread"], constants)


def kernel_time(machine: Machine, nbytes: float, instructions: float = 0.0, waiting: float = 0.0,
                kernels: int = 1) -> KernelTime:
    """Kernels that move ``nbytes``, issue ``instructions`` and wait ``waiting`` seconds: the longest of the three."""
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
    """Kernels that together move ``nbytes`` bytes and issue ``instructions``; None where the bandwidth is unknown."""
    machine = read_machine(device)
    return None if machine is None else kernel_time(machine, nbytes, instructions, kernels=kernels)


def missed_fraction(resident_bytes: float, machine: Machine) -> float:
    """Part of a second reading that the last cache no longer holds, of ``resident_bytes`` in work at a time."""
    # assumed: how steep it is; a cache is shared by more than one tensor and is not replaced in order of use
    ratio: float = (resident_bytes / machine.l2_bytes)**5
    return ratio / (1 + ratio)


# Time of pointwise kernels and of copies that PyTorch does with them.
# PyTorch (``ATen/native/cuda/CUDALoops.cuh``) has three kinds. Operands that all lie alike are taken as one row,
# several elements a load. Operands of several types are converted element by element. Operands that lie differently
# (broadcast, transposed) have each element's address computed, by a division per dimension.

SECTOR_BYTES = 32  #: what memory gives at least, whatever is asked for
#: Assumed: part of a conversion's instructions that addresses computed element by element leave to be waited for.
CONVERT_BESIDE_ADDRESS = 1 / 3


def random_time(elements: int, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """A kernel that draws random numbers (``DistributionTemplates.h``, ``Dropout.cu``), which slows the stream."""
    if (machine := read_machine(device)) is None:
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
    """A pointwise kernel over ``elements``; ``instructions`` are of one. ``dimensions`` are left after joining those
    that follow each other in all ``operands`` (results too): 1 if all lie alike. ``converts``: they have several types.
    """
    if (machine := read_machine(device)) is None:
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
    """How many dimensions are left after joining neighbours that every operand walks through evenly, by its strides,
    the result first: ``reorder_dimensions``, ``coalesce_dimensions`` in ``ATen/TensorIterator.cpp``.
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


# Time of look-ups, scattered sums, sorting and what is built on them.
# ``ATen/native/cuda/EmbeddingBackwardKernel.cu`` and ``Embedding.cu``, ``Indexing.cu``, ``Sort.cpp``: gradients of
# look-ups sort the indices, then sum the rows of each; up to 3,072 indices a kernel without sorting goes through them.

UNSORTED_INDICES = 3072       #: up to which the gradient of an embedding does not sort
INDICES_AT_A_TIME = 32        #: that a block of that kernel adds
ROWS_OF_A_SUM = 10            #: ``NROWS_PER_THREAD``
GRADIENT_KERNELS = 9          #: launches beside sorting: segments, partial sums, their offsets, the sums
RADIX_BITS = 8                #: of a pass of CUB's radix sort
SORT_BYTES = 3                #: times that keys and values move in a pass: counted, read, written


def sort_time(count: int, key_bytes: int, value_bytes: int, device: DeviceSpec, *,
              bits: int | None = None) -> KernelTime | None:
    """CUB's radix sort of ``count`` keys with values: a histogram, then a pass for each 8 bits of the key."""
    if (machine := read_machine(device)) is None:
        return None
    if count == 0:
        return NO_TIME
    passes = -(-(bits or 8 * key_bytes) // RADIX_BITS)
    nbytes = count * (key_bytes + passes * SORT_BYTES * (key_bytes + value_bytes))
    return kernel_time(machine, nbytes, waiting=(passes + 2) * machine.constants["library_seconds"], kernels=passes + 2)


def embedding_backward_time(indices: int, width: int, rows: int, itemsize: int, device: DeviceSpec, *,
                            index_bytes: int = 8) -> KernelTime | None:
    """The gradient of a table of ``rows`` by ``width``: cleared, then what was looked up is added to it."""
    if (machine := read_machine(device)) is None:
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
    return join_known(table, sort_time(indices, index_bytes, index_bytes, device, bits=max(rows - 1, 1).bit_length()),
                      kernel_time(machine, nbytes, waiting=waiting, kernels=GRADIENT_KERNELS))


def gather_rows_time(indices: int, width: int, itemsize: int, device: DeviceSpec) -> KernelTime | None:
    """Rows of a table, copied by a block each where 16 bytes divide them; the device starts so many blocks a second."""
    if (machine := read_machine(device)) is None:
        return None
    if indices == 0:
        return NO_TIME
    waiting = 0.0
    if width * itemsize % 16 == 0:
        waiting = indices * machine.constants["block_seconds"] / machine.multiprocessors
    return kernel_time(machine, indices * (2 * width * itemsize + 8), waiting=waiting)


def lone_block_time(loads: int, device: DeviceSpec, latencies: float = 1.0) -> KernelTime | None:
    """A kernel of one block that loads single elements from anywhere: the losses of few targets."""
    if (machine := read_machine(device)) is None:
        return None
    waiting = latencies * machine.latency * (1 + min(loads, 1024) / machine.constants["lone_loads"])
    return kernel_time(machine, 32 * loads, waiting=waiting)


def position_loss_time(batch: int, positions: int, device: DeviceSpec) -> KernelTime | None:
    """The loss of each position: a block an image, more only beyond 131,072 positions (``NLLLoss2d.cu``)."""
    if (machine := read_machine(device)) is None:
        return None
    blocks = -(-positions // 1024)
    an_image = max(1, blocks // 128)
    waves = -(-batch * an_image // (2 * machine.multiprocessors))
    waiting = waves * -(-blocks // an_image) * machine.constants["position_latencies"] * machine.latency
    return kernel_time(machine, batch * positions * 40, waiting=waiting)


def atomic_time(additions: int, distinct: int, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """Sums by atomic additions: those to one address follow each other."""
    if (machine := read_machine(device)) is None:
        return None
    if additions == 0:
        return NO_TIME
    crowding = max(1.0, additions / max(distinct, 1))
    return kernel_time(machine, nbytes, additions * crowding * machine.constants["atomic_instructions"])


# Time of pooling and resampling, whose kernels compute many addresses for few bytes.
# ``ATen/native/cuda/DilatedMaxPool2d.cu``, ``AveragePool2d.cu``, ``UpSampleBilinear2d.cu``.

BLOCK_THREADS = 1024  #: of the resampling kernel
SINGLE_POSITION = 3   #: times less that threads wait where all their loads are one: assumed


def window_time(elements: int, taps: float, nbytes: float, device: DeviceSpec) -> KernelTime | None:
    """A kernel that looks at ``taps`` neighbours for each of ``elements``: pooling, both ways."""
    if (machine := read_machine(device)) is None:
        return None
    return kernel_time(machine, nbytes, elements * taps * machine.constants["tap_instructions"])


def plane_time(planes: int, positions: int, nbytes: float, device: DeviceSpec,
               source_positions: int = 0) -> KernelTime | None:
    """Bilinear resampling forward: a thread a position goes through all ``planes`` (batch by channels)."""
    if (machine := read_machine(device)) is None:
        return None
    blocks = -(-positions // BLOCK_THREADS)
    waves = -(-blocks // (machine.multiprocessors * max(machine.resident_threads // BLOCK_THREADS, 1)))
    latencies = machine.constants["plane_latencies"] / (SINGLE_POSITION if source_positions == 1 else 1)
    waiting = waves * planes * latencies * machine.latency
    return kernel_time(machine, nbytes, waiting=waiting)


# Time of operators over lists of tensors: ``_foreach_*`` and the fused optimizers.
# ``ATen/native/cuda/MultiTensorApply.cuh``: blocks of 512 threads work on chunks of 65,536 elements of any tensor; a
# launch takes so many tensors and chunks as its arguments hold. The last chunks of a launch leave the device half idle.

CHUNK_ELEMENTS, CHUNK_THREADS = 65536, 512
#: Tensors and chunks of a launch by the number of lists, as built with CUDA 13 (arguments of 32 KiB):
#: ``depth_to_max_tensors``, ``depth_to_max_blocks``.
MAX_TENSORS = (770, 448, 336, 252, 210)
MAX_CHUNKS = 2240


def count_launches(sizes: Sequence[int], lists: int) -> int:
    """Launches for tensors of ``sizes`` elements in each of ``lists``."""
    most = MAX_TENSORS[min(max(lists, 1), len(MAX_TENSORS)) - 1]
    counts = [-(-size // CHUNK_ELEMENTS) for size in sizes if size]
    if len(counts) <= most and sum(counts) <= MAX_CHUNKS:
        return 1 if counts else 0
    launches = tensors = chunks = 0
    for left in counts:
        tensors += 1
        while left:
            taken = min(left, MAX_CHUNKS - chunks)
            chunks += taken
            left -= taken
            if chunks == MAX_CHUNKS or tensors == most and not left:
                launches, chunks, tensors = launches + 1, 0, 1 if left else 0
    return launches + (chunks > 0)


def foreach_time(sizes: Sequence[int], bytes_per_element: float, lists: int, device: DeviceSpec, *,
                 instructions: float = 0.0) -> KernelTime | None:
    """Kernels over tensors of ``sizes`` elements, with bytes and instructions of one in all ``lists`` together."""
    if (machine := read_machine(device)) is None:
        return None
    launches = count_launches(sizes, lists)
    if not launches:
        return NO_TIME
    elements = sum(sizes)
    chunks = sum(-(-size // CHUNK_ELEMENTS) for size in sizes)
    resident = machine.multiprocessors * machine.resident_threads // CHUNK_THREADS
    time = kernel_time(machine, elements * bytes_per_element, elements * instructions, kernels=launches)
    # the last chunks of each launch run beside ever fewer others: half a chunk's time in the mean
    chunk = min(CHUNK_ELEMENTS, elements / chunks) * bytes_per_element * min(resident, chunks) / machine.rate
    return KernelTime(math.fsum((time.seconds, launches * chunk / 2)), time.spread, time.bound, launches)
