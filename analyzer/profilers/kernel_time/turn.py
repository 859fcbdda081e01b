"""Which kernels run one at a time though they are on different streams."""
from __future__ import annotations

from collections.abc import Hashable

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.process_group import communicates

from .collective import find_medium

COMPUTE = "compute"


def find_turn(signature: Signature, kernel: KernelTime, device: DeviceSpec, log: Log) -> Hashable:
    """What the kernels of a call take turns for; None where they run beside all others.

    A kernel of enough blocks holds every multiprocessor, and the blocks of a second one are placed when there is room:
    two kernels that are bound by arithmetic or memory take as long beside each other as one after the other (Amert et
    al., "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, rules X1 and R1 to R3). Those too small
    to fill the device leave room. Collectives take turns for the links that bound them, and leave the multiprocessors
    to the others: the few that NCCL takes are not taken off. Copies from and to the host have an engine for each
    direction (CUDA C++ Programming Guide, "Concurrent Data Transfers").
    """
    if kernel.bound == "latency":
        return None
    if communicates(signature):
        return find_medium(signature, device, log.group_of(signature), log.world)
    return find_copy(signature) or COMPUTE


def find_copy(signature: Signature) -> str | None:
    """The engine of a copy between the device and the host; None of what multiprocessors do."""
    if not signature.inputs or not signature.outputs:
        return None
    is_copy = signature.op.__name__.partition(".")[0] in ("copy_", "_to_copy")
    source, target = signature.inputs[-1].device, signature.outputs[0].device
    if not is_copy or (source == "cpu") == (target == "cpu"):
        return None
    return "to the host" if target == "cpu" else "from the host"
