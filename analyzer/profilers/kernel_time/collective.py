"""The time of collectives, on the cluster that a device is taken to stand in."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.meta.signature import Signature
from analyzer.profilers.communication import kind_of_collective, message_bytes_of
from analyzer.profilers.process_group import count_ranks

# The names of `analyzer.profilers.communication`, which are those of operators, as the models have them.
_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "recv": "send"}
# Operators of these namespaces that send nothing.
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def communication_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Time of a collective among the ranks of its group; of nothing for what only waits for one or wraps its result.
    None where the group, or a link that it needs, is unknown, or the operator is.
    """
    name = signature.op._schema.name.partition("::")[2]
    if name in _LOCAL:
        return NO_TIME
    kind = "barrier" if name == "barrier" else kind_of_collective(signature)
    if kind is None:
        return None
    ranks = count_ranks(signature)
    if ranks is None or device.kind == "cpu":
        return None
    dtype = next((str(spec.dtype).removeprefix("torch.") for spec in signature.inputs), "float16")
    nbytes = 0 if kind == "barrier" else message_bytes_of(signature)
    return collective_time(_KINDS.get(kind, kind), nbytes, ranks, cluster_of(device), dtype=dtype)
