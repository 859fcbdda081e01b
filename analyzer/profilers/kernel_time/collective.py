"""The time of collectives, on the cluster that a device is taken to stand in."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.meta.signature import Signature
from analyzer.profilers.collective.omission import SILENT
from analyzer.profilers.collective.rule import message_of
from analyzer.record.process_group import ProcessGroupSpec, find_group


def communication_time(signature: Signature, device: DeviceSpec,
                       group: ProcessGroupSpec | None = None) -> KernelTime | None:
    """Time of a collective among the ranks of ``group``, by default the one that it names now; of nothing for what only
    waits for one or wraps its result. None where the group, or a link that it needs, is unknown, or the operator is.
    """
    name = signature.op._schema.name
    if name in SILENT:
        return NO_TIME
    group = group or find_group(signature)
    message = message_of(signature, group)
    if message is None or message.kind is None or message.bytes is None or group is None or device.kind == "cpu":
        return None
    if name.startswith("symm_mem::fused"):  # products too
        return None
    dtype = next((str(spec.dtype).removeprefix("torch.") for spec in signature.inputs), "float16")
    # a receive takes the time of the send that it waits for, a batch of both goes both ways at once
    kind = "send" if message.kind in ("recv", "send_recv") else message.kind
    return collective_time(kind, message.bytes, 2 if kind == "send" else group.size, cluster_of(device), dtype=dtype)
