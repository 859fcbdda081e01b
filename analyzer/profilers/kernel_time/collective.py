"""The time of collectives, on the cluster that a device is taken to stand in."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.collective import collective_time, find_path
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.meta.spec import Signature
from analyzer.profilers.collective import POINT_TO_POINT, SILENT, kind_of, message_of
from analyzer.record.process_group import ProcessGroupSpec, WorldFacts, find_group


def communication_time(signature: Signature, device: DeviceSpec, group: ProcessGroupSpec | None = None,
                       world: WorldFacts | None = None) -> KernelTime | None:
    """Time of a collective among the ranks of ``group``, by default the one that it names now, on the hosts of
    ``world``; of nothing for what only waits for one or wraps its result. None where the group, or a link that it
    needs, is unknown, or the operator is.

    Groups beside each other (the other ranks of a host in groups of their own) are taken not to slow each other down:
    each device has its own links and its own share of the network (`ClusterSpec.fabric`). A receive takes the time of
    its send; that the sender comes later is no time of its own.
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
    cluster, devices_per_host = _find_hosts(device, world)
    kind, ranks, size = message.kind, group.ranks, group.size
    if kind in POINT_TO_POINT:  # a batch goes both ways at once
        kind, size = "send", min(2, group.size)
        own = None if ranks is None or group.rank is None else ranks[group.rank]
        ranks = None if own is None or message.peer is None else (own, message.peer)
    return collective_time(kind, message.bytes, size, cluster, dtype=dtype,
                           ranks_per_host=share_of_host(ranks, size, devices_per_host, cluster))


def find_medium(signature: Signature, device: DeviceSpec, group: ProcessGroupSpec | None = None,
                world: WorldFacts | None = None) -> str | None:
    """The links that bound a collective of ``group``, as `Path.medium`; None where they are unknown, and of messages
    between two ranks, which leave room for others.
    """
    group = group or find_group(signature)
    if group is None or kind_of(signature) in POINT_TO_POINT:
        return None
    cluster, devices_per_host = _find_hosts(device, world)
    share = share_of_host(group.ranks, group.size, devices_per_host, cluster)
    path = find_path(cluster, group.size, share or min(group.size, cluster.devices_per_host))
    return None if path is None else path.medium


def _find_hosts(device: DeviceSpec, world: WorldFacts | None) -> tuple[ClusterSpec, int]:
    """The cluster that ranks are on, and how many of them each host has."""
    cluster = cluster_of(device) if world is None or world.cluster is None else world.cluster
    return cluster, cluster.devices_per_host if world is None else world.devices_per_host or cluster.devices_per_host


def share_of_host(ranks: Sequence[int] | None, size: int, devices_per_host: int, cluster: ClusterSpec) -> int | None:
    """How many ranks of a group one host holds, where ranks are given to hosts in order, as torchrun does; where hosts
    hold different numbers, the mean, rounded up. None (as many as fit) where the ranks are unknown.

    >>> from analyzer.hardware import find_cluster
    >>> dgx = find_cluster("dgx_h100")
    >>> [share_of_host(ranks, len(ranks), 8, dgx) for ranks in (range(16), range(0, 64, 8), (0, 2, 8, 10), range(4))]
    [8, 1, 2, 4]
    """
    if ranks is None:
        return None
    hosts = len({rank // devices_per_host for rank in ranks})
    return min(-(-size // hosts), cluster.devices_per_host)
