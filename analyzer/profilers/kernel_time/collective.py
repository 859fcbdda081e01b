"""The time of collectives, on the cluster that a device is taken to stand in."""
from __future__ import annotations

import functools

from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.meta.signature import Signature
from analyzer.profilers.communication import kind_of_collective, message_bytes_of
from analyzer.profilers.process_group import count_ranks

# The names of `analyzer.profilers.communication`, which are those of operators, as the models have them.
_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "recv": "send"}


@functools.lru_cache(maxsize=16)
def _cluster(device: DeviceSpec) -> ClusterSpec:
    return cluster_of(device)


def communication_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Time of a collective among the ranks of its group; of nothing for what only waits for one or wraps its result.
    None where the group, or a link that it needs, is unknown.
    """
    kind = kind_of_collective(signature)
    if kind is None:
        return NO_TIME
    ranks = count_ranks(signature)
    if ranks is None or device.kind == "cpu":
        return None
    dtype = next((str(spec.dtype).removeprefix("torch.") for spec in signature.inputs), "float16")
    return collective_time(_KINDS.get(kind, kind), message_bytes_of(signature), ranks, _cluster(device), dtype=dtype)
