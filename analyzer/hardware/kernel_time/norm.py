"""Time of layer, RMS, group and batch normalization: PyTorch's kernels, and cuDNN's for batches in float32.

From ``ATen/native/cuda/layer_norm_kernel.cu`` and ``Normalization.cuh``: a block a row forward; backward a second
kernel in which a block sums 32 columns over all rows; batches a block a channel, however few channels there are.
"""
from __future__ import annotations

import math

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime, join
from .pointwise import Machine, kernel_time, missed_fraction, read_machine

#: Blocks of 128 threads that a multiprocessor holds of the layer norm's forward kernel; registers limit it to half.
ROW_BLOCKS = 8
ROW_THREADS, VECTOR = 128, 4  #: threads of a row, elements that each takes at a time
COLUMNS = 32           #: that a block of the gradients of weight and bias sums
ROWS_AT_A_TIME = 256   #: for more than 256 rows: ``rows_per_block_y``
BLOCK_THREADS = 512    #: ``MAX_BLOCK_SIZE`` of batch norm, and what cuDNN's kernels take
THREAD_BYTES = 16      #: of one load of a thread in cuDNN's kernels
#: Bytes of a channel that cuDNN's forward kernel keeps on the multiprocessor, so that it reads them once: assumed, of
#: the 227 KiB of shared memory that a block may have since Hopper (CUDA C++ Programming Guide, Compute Capabilities).
KEPT_BYTES = 200 * 1024
#: Of the latency of memory, that of the last cache (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
#: Microbenchmarking", table 3.1: 193 cycles beside 450 or more).
CACHE_LATENCY = 0.4
#: Instructions of one element: Welford's update divides; the gradient does not (counted in ``Normalization.cuh``).
WELFORD_INSTRUCTIONS, GRADIENT_INSTRUCTIONS = 64, 25


def layer_norm_time(rows: int, columns: int, itemsize: int, device: DeviceSpec,
                    written_itemsize: int | None = None) -> KernelTime | None:
    """Forward: each row is read twice, the second time from the last cache where the rows in work fit it."""
    if (machine := read_machine(device)) is None:
        return None
    if rows == 0:
        return NO_TIME
    row = columns * itemsize
    written = columns * (written_itemsize or itemsize)
    again = missed_fraction(machine.multiprocessors * ROW_BLOCKS * (row + written), machine)
    steps = -(-columns // (ROW_THREADS * VECTOR))
    instructions = rows * ROW_THREADS * machine.constants["row_instructions"] * (1 + steps)
    return kernel_time(machine, rows * (row * (1 + again) + written), instructions,
                       waiting=machine.constants["row_latencies"] * machine.latency)


def layer_norm_backward_time(rows: int, columns: int, itemsize: int, device: DeviceSpec, *, of_input: bool = True,
                             of_weight: bool = True) -> KernelTime | None:
    """Backward: a block a row for the input's gradient, and one for 32 columns of those of weight and bias."""
    if (machine := read_machine(device)) is None:
        return None
    if rows == 0:
        return NO_TIME
    parts = []
    nbytes = rows * columns * itemsize
    if of_input:
        parts.append(kernel_time(machine, 3 * nbytes, waiting=machine.constants["row_latencies"] * machine.latency))
    if of_weight:
        parts.append(column_sum_time(rows, columns, 2 * nbytes, machine))
    return join(parts)


def column_sum_time(rows: int, columns: int, nbytes: int, machine: Machine) -> KernelTime:
    """The gradients of weight and bias: 32 columns a block, 256 rows a time (``LaunchGammaBetaBackwardCUDAKernel``)."""
    blocks = -(-columns // COLUMNS)
    if rows > 64 * 1024 and blocks < machine.multiprocessors / 2:
        return kernel_time(machine, nbytes, kernels=2)
    steps = -(-rows // min(ROWS_AT_A_TIME, max(8, rows)))
    waves = -(-blocks // (2 * machine.multiprocessors))
    return kernel_time(machine, nbytes,
                       waiting=waves * steps * machine.constants["column_step_latencies"] * machine.latency)


def channel_seconds(channels: int, loads: int, instructions: float, machine: Machine, missed: float = 1.0) -> float:
    """Seconds of blocks of 512 threads, one a channel, of ``loads`` in a row, ``missed`` of them not in the cache."""
    resident = machine.resident_threads // BLOCK_THREADS
    waves = -(-channels // (machine.multiprocessors * resident))
    together = min(-(-channels // machine.multiprocessors), resident)
    issue = BLOCK_THREADS * instructions / (machine.issue_rate / machine.multiprocessors)
    latency = machine.latency * (missed + (1 - missed) * CACHE_LATENCY)
    return waves * loads * (latency + together * issue)


def channel_loads(batch: int, positions: int) -> int:
    """Loads of each of 512 threads of a channel, along positions as the next power of two (``getNumThreads``)."""
    along = min(max(32, 1 << (max(positions, 1) - 1).bit_length()), BLOCK_THREADS)
    return -(-batch // max(1, BLOCK_THREADS // along)) * -(-positions // along)


def native_batch_norm_time(batch: int, channels: int, positions: int, itemsize: int, device: DeviceSpec, *,
                           training: bool = True) -> KernelTime | None:
    """PyTorch's own: statistics by one block a channel, then a pointwise kernel, a block for each image and channel."""
    if (machine := read_machine(device)) is None:
        return None
    elements = batch * channels * positions
    if elements == 0:
        return NO_TIME
    parts = []
    if training:
        missed = missed_fraction(elements * itemsize, machine)  # what was made just before lies in the cache
        seconds = channel_seconds(channels, channel_loads(batch, positions), WELFORD_INSTRUCTIONS, machine, missed)
        parts.append(kernel_time(machine, elements * itemsize, waiting=seconds))
        parts.append(kernel_time(machine, 0))  # running statistics
    rows = channels * min(batch, max(1, 256 * 1024 // channels))
    parts.append(kernel_time(machine, 2 * elements * itemsize,
                             waiting=rows * machine.constants["block_seconds"] / machine.multiprocessors))
    return join(parts)


def native_batch_norm_backward_time(batch: int, channels: int, positions: int, itemsize: int,
                                    device: DeviceSpec) -> KernelTime | None:
    """PyTorch's own kernel: one block a channel goes through it twice."""
    if (machine := read_machine(device)) is None:
        return None
    if batch * channels * positions == 0:
        return NO_TIME
    seconds = 2 * channel_seconds(channels, channel_loads(batch, positions), GRADIENT_INSTRUCTIONS, machine)
    return kernel_time(machine, 5 * batch * channels * positions * itemsize, waiting=seconds)


def cudnn_batch_norm_time(batch: int, channels: int, positions: int, itemsize: int, device: DeviceSpec, *,
                          backward: bool = False) -> KernelTime | None:
    """CuDNN's kernels in training: a block a channel, which is read twice unless it fits the multiprocessor."""
    if (machine := read_machine(device)) is None:
        return None
    channel = batch * positions * itemsize
    if channel * channels == 0:
        return NO_TIME
    passes = 5 if backward else 2 if channel <= KEPT_BYTES else 3
    loads = math.ceil(passes * channel / (BLOCK_THREADS * THREAD_BYTES))
    waves = -(-channels // machine.multiprocessors)
    latencies = machine.constants["gradient_latencies"] if backward else 1.0
    if backward:  # two blocks fit a multiprocessor
        waves = -(-waves // 2) if waves > 1 else 1
    waiting = waves * (loads * latencies * machine.latency + 2 * machine.latency)
    return kernel_time(machine, passes * channel * channels, waiting=waiting)


def cudnn_normalize_time(batch: int, channels: int, positions: int, itemsize: int,
                         device: DeviceSpec) -> KernelTime | None:
    """CuDNN's kernel in inference: a block for each image and channel reads and writes it."""
    if (machine := read_machine(device)) is None:
        return None
    rows = batch * channels
    if rows * positions == 0:
        return NO_TIME
    return kernel_time(machine, 2 * rows * positions * itemsize / machine.constants["normalize_fraction"],
                       waiting=rows * machine.constants["block_seconds"] / machine.multiprocessors)


def channels_last_norm_time(nbytes: int, device: DeviceSpec, *, training: bool = True,
                            backward: bool = False) -> KernelTime | None:
    """Batches whose channels lie side by side: sums over the columns of a tall matrix, then a pointwise kernel."""
    if (machine := read_machine(device)) is None:
        return None
    if nbytes == 0:
        return NO_TIME
    tensors = 2 if backward else 1
    apply = kernel_time(machine, (tensors + 1) * nbytes)
    if not training and not backward:
        return apply
    sums = kernel_time(machine, tensors * nbytes / machine.constants["reduction_fraction"])
    return join([sums, kernel_time(machine, 0), apply])


def moments_time(groups: int, elements: int, itemsize: int, device: DeviceSpec) -> KernelTime | None:
    """Mean and variance of groups of neighbours, a block each: few groups leave most of the device idle."""
    if (machine := read_machine(device)) is None:
        return None
    if groups * elements == 0:
        return NO_TIME
    missed = missed_fraction(groups * elements * itemsize, machine)
    seconds = channel_seconds(groups, -(-elements // BLOCK_THREADS), WELFORD_INSTRUCTIONS, machine, missed)
    return kernel_time(machine, groups * elements * itemsize, waiting=seconds)
