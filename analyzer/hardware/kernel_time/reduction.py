"""Time of reductions and of softmax."""
from __future__ import annotations

from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime
from .pointwise import kernel_time, missed_fraction, read_machine

# Time of reductions (sum, mean, max, all, norms of vectors) by PyTorch's one reduction kernel.
# ``setReduceConfig`` of ``ATen/native/cuda/Reduce.cuh`` divides the work: threads of a block stand along the fastest
# dimension, be it reduced or not; where outputs are few, several blocks share one and the last of them adds up what the
# others left in memory, which takes longer than the sum itself.

MAX_THREADS = 512      #: of a block: ``mnt_wrapper::MAX_NUM_THREADS``
VECTOR = 4             #: elements of one load
UNROLLED = 4           #: loads that a thread has under way: ``vt0``
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256  #: per thread, before and after a reduction is divided among blocks


class ReduceSplit(NamedTuple):
    """How a reduction is divided; in ``rounds`` the last of ``sharing`` blocks adds up what the others left."""

    blocks: int
    threads: int
    values: int
    sharing: int
    rounds: int


def last_power(n: int) -> int:
    """The largest power of two that is at most ``n``; 1 for less than 2."""
    return 1 << (max(n, 1).bit_length() - 1)


def divide(outputs: int, reduced: int, reduces_fastest: bool, multiprocessors: int,
           resident_threads: int) -> ReduceSplit:
    """The division of a reduction of ``reduced`` elements for each of ``outputs``, as ``setReduceConfig`` does it."""
    vector = VECTOR if not reduces_fastest or reduced >= 128 else 1
    if not reduces_fastest:
        while outputs % vector:
            vector //= 2
    most = MAX_THREADS if reduces_fastest else MAX_THREADS // vector
    across, along = (reduced, outputs) if reduces_fastest else (outputs, reduced)
    width_limit = last_power(min(across // vector, most))
    height = min(last_power(min(along, most)), most // min(width_limit, WARP))
    width = min(width_limit, most // height)
    values = reduced
    outputs_a_block = 1
    if reduces_fastest:
        values = -(-values // width)
    else:
        outputs_a_block = width * vector
    splits_warps = values >= min(height * 16, MAX_VALUES)
    if splits_warps:
        values = -(-values // height)
    else:
        outputs_a_block *= height
    grid = -(-outputs // outputs_a_block)
    threads = width * height
    target = multiprocessors * (resident_threads // threads)
    sharing, rounds = 1, 0
    if splits_warps and values >= MAX_VALUES and grid <= target:
        sharing = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
        values = -(-values // sharing)
        rounds = -(-sharing // (threads if reduces_fastest else height)) if sharing > 1 else 0
    return ReduceSplit(grid * sharing, threads, -(-values // vector) if reduces_fastest else values, sharing, rounds)


def reduction_time(outputs: int, reduced: int, itemsize: int, device: DeviceSpec, *, reduces_fastest: bool = True,
                   written_itemsize: int | None = None) -> KernelTime | None:
    """A reduction of ``reduced`` elements for each of ``outputs``; ``reduces_fastest``: of neighbours in memory."""
    if (machine := read_machine(device)) is None:
        return None
    if outputs == 0:
        return NO_TIME
    division = divide(outputs, max(reduced, 1), reduces_fastest, machine.multiprocessors, machine.resident_threads)
    nbytes = outputs * reduced * itemsize / machine.constants["reduction_fraction"]
    nbytes += outputs * (written_itemsize or itemsize)
    resident = machine.multiprocessors * max(machine.resident_threads // division.threads, 1)
    waves = -(-division.blocks // resident)
    # threads wait for their loads, so many at a time, block after block
    loading = waves * -(-division.values // UNROLLED) * machine.latency
    time = kernel_time(machine, nbytes, outputs * reduced * machine.constants["reduction_instructions"], loading)
    tail = waves * machine.constants["block_latencies"] * machine.latency
    if division.sharing > 1:
        tail += machine.constants["sharing_seconds"] + division.rounds * machine.constants["round_seconds"]
    return KernelTime(time.seconds + tail, time.spread, "latency" if tail > time.seconds else time.bound)


# Time of softmax and log-softmax: PyTorch's kernels for short rows, long rows and inner dimensions.
# ``ATen/native/cuda/SoftMax.cu``: a row of up to 1,024 elements and 4 KiB stays in the registers of a warp. A longer
# one has a block, which goes through it three times (largest, sum, result), from shared memory where it fits.

WARP_ELEMENTS, WARP_BYTES = 1024, 4096  #: of a row that a warp keeps: ``dim_size <= 1024 && dim_size*size <= 4096``
SHARED_BYTES = 48 * 1024                #: that a block has without asking for more
ALIGNED_BYTES = 16                      #: of a vector of shared memory
SOFTMAX_THREADS = 1024                  #: of a block at most: ``max_threads`` there


def softmax_time(rows: int, columns: int, itemsize: int, device: DeviceSpec, *, written_itemsize: int | None = None,
                 backward: bool = False) -> KernelTime | None:
    """Softmax over rows whose elements are neighbours. Backward reads two tensors, twice where the row is long."""
    if (machine := read_machine(device)) is None:
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
    while threads < min(columns * itemsize // ALIGNED_BYTES, SOFTMAX_THREADS) // 2:
        threads *= 2
    threads = SOFTMAX_THREADS if columns > 2 * SOFTMAX_THREADS else threads
    resident = machine.multiprocessors * min(machine.resident_threads // threads, 16)
    again = rows * row * tensors * (1 if backward else 2)
    missed = again * missed_fraction(resident * (tensors * row + written), machine)
    waiting = (nbytes + missed) / machine.rate + (again - missed) / machine.cache_rate
    time = kernel_time(machine, nbytes + missed, instructions, waiting)
    return KernelTime(time.seconds, time.spread, "memory" if time.bound == "latency" and rows > resident
                      else time.bound)


def inner_softmax_time(outer: int, size: int, inner: int, itemsize: int, device: DeviceSpec, *,
                       written_itemsize: int | None = None, backward: bool = False) -> KernelTime | None:
    """Softmax over a dimension with a step of ``inner``: a thread goes through it three times, backward twice."""
    if (machine := read_machine(device)) is None:
        return None
    elements = outer * size * inner
    if elements == 0:
        return NO_TIME
    tensors = 2 if backward else 1
    nbytes = elements * (tensors * itemsize + (written_itemsize or itemsize))
    resident = min(machine.multiprocessors * machine.resident_threads, outer * inner) * size * itemsize * (tensors + 1)
    again = elements * itemsize * tensors * (1 if backward else 2) * missed_fraction(resident, machine)
    return kernel_time(machine, nbytes + again, elements * machine.constants["inner_softmax_instructions"])
