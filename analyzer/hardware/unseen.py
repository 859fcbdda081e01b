"""Device memory that no allocator of PyTorch sees: what the driver and the libraries take for themselves.

NVIDIA documents no figures, and they change with the driver, the libraries and the kernels loaded. Where a public
out-of-memory message tells all that its process held and what PyTorch had reserved, the rest took the difference.
"""
from __future__ import annotations

from typing import NamedTuple

from .device_spec import DeviceSpec, read_shipped

_MIB = 2**20
_GIB = 2**30


class UnseenMemory(NamedTuple):
    """One thing outside the allocator. ``bytes`` None is unknown; ``source`` says where from, or what is known."""

    what: str
    bytes: int | None
    source: str


def _outside(in_use_gib: float, allocated_gib: float, unallocated_bytes: float) -> int:
    """What an out-of-memory message leaves for others than PyTorch: its figures are rounded to 0.01 GiB."""
    return round(in_use_gib * _GIB - allocated_gib * _GIB - unallocated_bytes)


# Context, loaded kernels and library handles together, of one process on one GPU.
_CONTEXTS: dict[str, tuple[int, str]] = {
    "h200": (_outside(139.60, 138.14, 824.86 * _MIB),
             "an out-of-memory message in github.com/Zyora-Dev/zse, error.md (3ffdf12), an H200: 139.60 GiB in use "
             "- 138.14 GiB allocated - 824.86 MiB unallocated; varies with driver, libraries and kernels"),
    "rtx_4090": (_outside(23.60, 22.90, 194.87 * _MIB),
                 "pytorch/pytorch issue 16417 (2024-03-13), a card of 23.65 GiB: 23.60 GiB in use - 22.90 GiB "
                 "allocated - 194.87 MiB unallocated; varies with driver, libraries and kernels")}
# Where nothing tells which device is alike: each thing on its own, with what is known of it.
_UNKNOWN = (
    UnseenMemory(
        "CUDA context and kernels", None,
        "not known for this device; with the handles 0.50 GiB on an L40S (huggingface/sentence-transformers issue 3214)"
    ),
    UnseenMemory("cuBLAS handles", None,
                 "not known; their workspaces are in the peak (PyTorch's CublasHandlePool.cpp)"),
    UnseenMemory("cuDNN handle", None, "not known; convolution workspaces are in the peak (PyTorch's Conv_v8.cpp)"))

# github.com/NVIDIA/nccl/issues/964: 4 A100 with NVLink, an all-reduce of 4 MB in each process group
_NCCL_PAIR_BYTES, _NCCL_GROUP_BYTES = 544 * _MIB, 688 * _MIB
_NCCL_SOURCE = "NVIDIA/nccl issue 964: measured on 4 A100 with NVLink, {}; every further communicator takes as much"
# NCCL's src/init.cc, computeBuffSizes: each connection receives into buffers of the protocols LL (8 lines of 16 bytes,
# 512 threads, 8 steps: 512 KiB), LL128 (120 elements of 8 bytes, 640 threads, 8 steps: 4800 KiB) and Simple
# (NCCL_BUFFSIZE, 4 MiB), which with what steers them take 10 MiB in pages of 2 MiB, and 2 MiB to send: the sizes that
# issue 1685 lists. How many channels are connected, up to 32, is decided when it runs.
_NCCL_ELSEWHERE = ("not known for this device: 12 MiB a connection of each channel and communicator (NVIDIA/nccl issue "
                   "1685), and it decides how many when it runs (issue 986); 544 to 688 MB on A100 (issue 964)")


def list_unseen(device: DeviceSpec, world_size: int = 1) -> tuple[UnseenMemory, ...]:
    """What takes a ``device``'s memory outside the allocator in a process of ``world_size`` ranks; nothing on a host.

    >>> from analyzer.hardware import find_device
    >>> for unseen in list_unseen(find_device("a100_80gb"), world_size=2):
    ...     print(unseen.bytes, unseen.what)
    547283272 CUDA context, kernels, cuBLAS and cuDNN handles (assumed: as on rtx_4090)
    570425344 NCCL buffers (one communicator)
    """
    if device.kind != "cuda":
        return ()
    found = _list_contexts(device)
    if world_size > 1:
        if device.chip.startswith("a100"):
            nbytes, ranks = (_NCCL_PAIR_BYTES, "2") if world_size == 2 else (_NCCL_GROUP_BYTES, "more than 2")
            found.append(UnseenMemory("NCCL buffers (one communicator)", nbytes, _NCCL_SOURCE.format(f"{ranks} ranks")))
        else:
            found.append(UnseenMemory("NCCL buffers", None, _NCCL_ELSEWHERE))
    return tuple(found)


def _list_contexts(device: DeviceSpec) -> list[UnseenMemory]:
    """What driver and libraries take: known, else as on the known device nearest in multiprocessors. A context holds
    local memory and stacks for all threads that run (CUDA programming guide, cudaDeviceSetLimit).
    """
    if device.vendor == "AMD":
        return [UnseenMemory("HIP context, kernels and library handles", None, "not known for AMD's runtime")]
    what = "CUDA context, kernels, cuBLAS and cuDNN handles"
    known = _CONTEXTS.get(device.chip)
    if known is not None:
        return [UnseenMemory(what, *known)]
    own = device.multiprocessors
    if own is None:
        return list(_UNKNOWN)
    multiprocessors = {name: getattr(read_shipped(name), "multiprocessors", None) or 0 for name in _CONTEXTS}
    other = min(multiprocessors, key=lambda name: abs(multiprocessors[name] - own))
    nbytes, source = _CONTEXTS[other]
    return [UnseenMemory(f"{what} (assumed: as on {other})", nbytes,
                         f"not known for this device; of those known {other} is nearest in multiprocessors "
                         f"({multiprocessors[other]}, here {own}): {source}")]
