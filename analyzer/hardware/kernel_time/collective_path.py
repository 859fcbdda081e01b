"""Which links a group of ranks talks over, and how fast each of them can."""
from __future__ import annotations

from typing import NamedTuple

from analyzer.hardware.cluster_spec import ClusterSpec
from analyzer.hardware.link_spec import LinkSpec

# Rings that the hybrid cube mesh of DGX-1 allows among the first n devices, of 6 links a device: bus bandwidth of its
# all-reduce over that of a link (github.com/VIA-Research/vTrain, trace/v100).
_CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
_CUBE_MESH_LINKS = 6


class Path(NamedTuple):
    """What bounds a group of ranks.

    - ``medium``: which constants hold: ``"nvlink"`` (Infinity Fabric too), ``"pcie"``, ``"host"`` (PCI Express without
      peer access, so through the memory of the host), ``"sockets"`` (the same, and from one processor to the other),
      ``"infiniband"`` or ``"ethernet"``.
    - ``bandwidth``: bytes/s of one rank in one direction over the slowest link, peak.
    - ``domains``: groups of ranks between which the fabric lies; 1 where it is not used.
    - ``ranks_per_domain``: ranks that share links faster than the fabric.
    - ``inner``: the path within a domain, where the fabric is used and a domain has several ranks.
    - ``reduces_in_switch``: whether switches add up.
    - ``hop_seconds``: latency of one hop, where the link's specification says it.
    """

    medium: str
    bandwidth: float
    domains: int
    ranks_per_domain: int
    inner: Path | None
    reduces_in_switch: bool
    hop_seconds: float | None


def find_path(cluster: ClusterSpec, ranks: int, ranks_per_host: int) -> Path | None:
    """The path of ``ranks`` ranks, ``ranks_per_host`` on each host; None where the link they need is unknown.

    Ranks that one set of links joins use these alone, also across hosts (GB200 NVL72). Ranks of one host that its own
    links do not all join (bridged pairs) cross the host's bus. All others cross the fabric, over which a ring runs as
    often as a host has ranks: each of them has its own network card.
    """
    hosts = -(-ranks // ranks_per_host)
    link = cluster.link
    joined = 0 if link is None else link.devices or cluster.devices_per_host
    spans_hosts = joined > cluster.devices_per_host
    reached = hosts * cluster.devices_per_host if spans_hosts else ranks if hosts == 1 else joined + 1
    if link is not None and reached <= joined:
        return _inside(link, ranks, joined)
    if hosts == 1:
        return None if cluster.host_link is None else _inside(cluster.host_link, ranks, cluster.devices_per_host)
    if cluster.fabric is None:
        return None
    per_domain = ranks_per_host
    if spans_hosts:  # as many hosts of the group as share the links
        per_domain = min(ranks, ranks_per_host * max(joined // cluster.devices_per_host, 1))
    domains = -(-ranks // per_domain)
    inner = None if per_domain == 1 else find_path(cluster, per_domain, min(per_domain, ranks_per_host))
    fabric = cluster.fabric
    return Path(fabric.kind, fabric.bandwidth * per_domain, domains, per_domain, inner,
                fabric.reduces_in_switch, fabric.latency_seconds)


def _inside(link: LinkSpec, ranks: int, joined: int) -> Path:
    medium, bandwidth = "nvlink", link.bandwidth
    if link.kind == "pcie":
        medium = "pcie" if link.has_peer_access else "host" if 2 * ranks <= joined else "sockets"
    elif link.kind == "infinity_fabric":  # each pair has an equal part of the links, and only theirs are used
        bandwidth *= (ranks - 1) / (joined - 1)
    elif link.kind == "nvlink_mesh":
        bandwidth *= _CUBE_MESH_RINGS.get(ranks, _CUBE_MESH_LINKS) / _CUBE_MESH_LINKS
    return Path(medium, bandwidth, 1, ranks, None, link.reduces_in_switch, link.latency_seconds)
