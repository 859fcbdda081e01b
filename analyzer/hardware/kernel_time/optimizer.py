"""Time of operators over lists of tensors: ``_foreach_*`` and the fused optimizers.

``ATen/native/cuda/MultiTensorApply.cuh``: blocks of 512 threads work on chunks of 65,536 elements of any tensor; a
launch takes so many tensors and chunks as its arguments hold. The last chunks of a launch leave the device half idle.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime
from .pointwise import kernel_time, read_machine

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
    """Kernels over tensors of ``sizes`` elements that read and write ``bytes_per_element`` in all ``lists`` together.

    ``instructions``: of one element. None where the device's bandwidth is unknown.
    """
    machine = read_machine(device)
    if machine is None:
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
