"""What kernels do on their stream, and which of them run one at a time though they are on different ones."""
from __future__ import annotations

from collections.abc import Hashable

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.process_group import communicates

from .collective import find_medium

COMPUTE, COMMUNICATION, TO_HOST, FROM_HOST = "compute", "communication", "copy to host", "copy from host"


def find_kind(signature: Signature) -> str:
    """What the kernels of a call do: they compute, communicate, or copy from or to the host."""
    if communicates(signature):
        return COMMUNICATION
    if signature.op.__name__.partition(".")[0] in ("copy_", "_to_copy") and signature.inputs and signature.outputs:
        source, target = signature.inputs[-1].device, signature.outputs[0].device
        if (source == "cpu") != (target == "cpu"):
            return TO_HOST if target == "cpu" else FROM_HOST
    return COMPUTE


def find_turn(signature: Signature, kind: str, kernel: KernelTime, device: DeviceSpec, log: Log) -> Hashable:
    """What the kernels of a call take turns for; None where they run beside all others.

    A kernel of enough blocks holds every multiprocessor, and the blocks of a second one are placed when there is room:
    two kernels that are bound by arithmetic or memory take as long beside each other as one after the other (Amert et
    al., "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, rules X1 and R1 to R3). Those too small
    to fill the device leave room. Collectives take turns for the links that bound them, and leave the multiprocessors
    to the others: the few that NCCL takes are not taken off. Copies from and to the host have an engine for each
    direction (CUDA C++ Programming Guide, "Concurrent Data Transfers").
    """
    if kernel.bound == "latency" or not kernel.kernels:
        return None
    return kind if kind != COMMUNICATION else find_medium(signature, device, log.group_of(signature), log.world)
