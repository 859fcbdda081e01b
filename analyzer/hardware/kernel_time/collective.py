"""Time of collectives, and of copies between host and device and between two devices."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from analyzer.errors import InputError
from analyzer.hardware.cluster_spec import ClusterSpec, LinkSpec, cluster_of
from analyzer.hardware.device_spec import DeviceSpec

from .estimate import NO_TIME, KernelTime, find_constants

# Rings that the hybrid cube mesh of DGX-1 allows among the first n devices, of 6 links a device: bus bandwidth of its
# all-reduce over that of a link (github.com/VIA-Research/vTrain, trace/v100).
_CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
_CUBE_MESH_LINKS = 6


#: By medium, the channels of a large collective, each of which holds a multiprocessor. NCCL tells them with
#: NCCL_DEBUG=INFO: "24 coll channels" between the GPUs of a DGX A100 and of a DGX H100, "16 coll channels" between
#: hosts of eight H100, and 2 where no links but PCI Express are there (src/graph/connect.cc doubles those of its search
#: up to the links' bandwidth).
CHANNELS = {"nvlink": 24, "infiniband": 16, "ethernet": 16, "pcie": 2, "host": 2, "sockets": 2}


class Path(NamedTuple):
    """What bounds a group of ranks.

    - ``medium``: which constants hold: ``"nvlink"`` (Infinity Fabric too), ``"pcie"``, ``"host"`` (PCI Express without
      peer access, so through the host's memory), ``"sockets"`` (the same, and from one processor to the other),
      ``"infiniband"`` or ``"ethernet"``.
    - ``bandwidth``: bytes/s of one rank in one direction over the slowest link, peak.
    - ``domains``: groups of ranks between which the fabric lies, each of ``ranks_per_domain``, which share faster
      links; ``inner``: the path within one, if it has several ranks.
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
    """The path of ``ranks`` ranks, ``ranks_per_host`` on each host; None where the link they need is unknown. Ranks
    that one set of links joins use these alone, also across hosts (GB200 NVL72). Ranks of one host that its own links
    do not all join (bridged pairs) cross the host's bus. All others cross the fabric, over which a ring runs as often
    as a host has ranks: each of them has its own network card.
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
        medium = "pcie" if link.has_peer_access else _medium_of_host(ranks, joined)
    elif link.kind == "infinity_fabric":  # each pair has an equal part of the links, and only theirs are used
        bandwidth *= (ranks - 1) / (joined - 1)
    elif link.kind == "nvlink_mesh":
        bandwidth *= _CUBE_MESH_RINGS.get(ranks, _CUBE_MESH_LINKS) / _CUBE_MESH_LINKS
    return Path(medium, bandwidth, 1, ranks, None, link.reduces_in_switch, link.latency_seconds)


def _medium_of_host(ranks: int, devices: int) -> str:
    """Of ranks that reach each other through the memory of their host, each of whose two processors has half of the
    ``devices``: whether all are at one of them.
    """
    return "host" if 2 * ranks <= devices else "sockets"


# How long a collective takes, by kind, bytes, ranks and what joins them: latency of the steps, then the wire.
# The algorithms are NCCL's (github.com/NVIDIA/nccl, src/graph/tuning.cc and src/device): rings, trees between hosts,
# NVLink SHARP where switches add up, grouped sends. A ring has three protocols, of which the fastest for the size
# counts: LL flags every 8 bytes, so it starts at once and uses little of the bandwidth; LL128 flags every 128 bytes;
# Simple waits for whole chunks and reaches the full rate. Chunks are pipelined, which costs the square root of latency
# times transfer besides, as in every pipeline whose chunks are as large as balances filling it against starting them.

#: What ``collective_time`` knows.
COLLECTIVE_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send", "gather",
                    "scatter", "barrier")
_BARRIER_BYTES = 4  # an all-reduce of one number: torch's ProcessGroupNCCL::barrier
_SHARP_RANKS = 5  # NCCL 2.27 takes a ring below: measured on H200 and B200 (stas00/ml-engineering, network/README.md)
_THROUGH_HOST = ("host", "sockets")
_EIGHT_BIT = frozenset(("int8", "uint8", "bool"))


class Cost(NamedTuple):
    """Seconds of a collective, and how many of them bytes take to cross the slowest link."""

    seconds: float
    transfer: float


def name_spread(path: Path, cost: Cost) -> str:
    """The constant that is the spread, by medium and share of transfer: NCCL changes protocols between the sizes."""
    share = cost.transfer / cost.seconds
    return f"{path.medium}_spread_{'small' if share < 0.1 else 'middle' if share < 0.6 else 'large'}"


# Of n ranks: steps that a block takes, and times that the whole buffer crosses the slowest link
# (NVIDIA nccl-tests, doc/PERFORMANCE.md). Broadcasts and reductions are pipelined chains.
_RING: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n), "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n), "broadcast": lambda n: (n - 1, 1.0), "reduce": lambda n: (n - 1, 1.0)}


def collective_time(kind: str, nbytes: int, ranks: int, cluster: ClusterSpec, *, ranks_per_host: int | None = None,
                    dtype: str = "float16") -> KernelTime | None:
    """Time of one collective of ``ranks`` ranks on ``cluster``; None where a link that it needs is unknown. ``kind`` is
    one of `COLLECTIVE_KINDS`, ``nbytes`` its whole buffer: the gathered output of an all-gather or gather, the
    unscattered input of a reduce-scatter, all-to-all or scatter, the reduced or sent buffer of the others.
    ``ranks_per_host``: how many ranks of the group share a host; by default as many as fit. ``dtype`` is a torch dtype
    or its name: switches add up no 8-bit numbers. All ranks come at once. Where it is not told that more than two
    cards reach each other over PCI Express, the spread holds that they do not. Raises InputError for values that cannot
    be.
    """
    _check(kind, nbytes, ranks, cluster, ranks_per_host)
    if ranks == 1 or nbytes == 0 and kind != "barrier":
        return NO_TIME
    per_host = min(ranks, ranks_per_host or cluster.devices_per_host)
    path = find_path(cluster, ranks, per_host)
    if path is None:
        return None
    constants = find_constants("collective", cluster.device)
    cost = estimate_collective(kind, nbytes, ranks, path, constants, dtype)
    bound = "communication" if 2 * cost.transfer > cost.seconds else "latency"
    spread = constants[name_spread(path, cost)]
    if path.medium == "pcie" and ranks > 2 and _peers_are_assumed(cluster):
        through_host = path._replace(medium=_medium_of_host(ranks, cluster.devices_per_host))
        slow = estimate_collective(kind, nbytes, ranks, through_host, constants, dtype)
        longest = slow.seconds * (1 + constants[name_spread(through_host, slow)])
        return KernelTime(cost.seconds, max(spread, longest / cost.seconds - 1), bound, below=spread)
    return KernelTime(cost.seconds, spread, bound)


def _peers_are_assumed(cluster: ClusterSpec) -> bool:
    """Whether it is not told that cards reach each other over their bus. Two mostly do; of more, some machines' do,
    and on others all go through the host's memory: of the L40S that were measured, two did and four did not.
    """
    return cluster.host_link is not None and "has_peer_access" not in cluster.host_link.sources


def estimate_collective(kind: str, nbytes: int, ranks: int, path: Path, constants: Mapping[str, float],
                        dtype: str = "float16") -> Cost:
    """What `collective_time` predicts and the fit varies: seconds of a collective of two ranks or more."""
    if kind == "barrier":
        kind, nbytes = "all_reduce", _BARRIER_BYTES
    if kind == "send":  # one rank to one other, which waits for it
        shared = path.ranks_per_domain if path.domains > 1 else 1
        transfer = nbytes * shared / _usable(path, 2, constants, "pair")
        return Cost(constants["pair_base_seconds"] + _hop(path, constants) + transfer, transfer)
    if kind not in _RING:
        return _sends(nbytes, ranks, path, constants)
    cost, c = _ring(kind, nbytes, ranks, path, constants), constants
    is_added = kind == "all_reduce" and path.reduces_in_switch and str(dtype).removeprefix("torch.") not in _EIGHT_BIT
    if is_added and path.medium == "nvlink" and ranks >= _SHARP_RANKS:  # a rank sends its buffer once and gets the sum
        transfer, start = nbytes / (c["sharp_share"] * path.bandwidth), c["base_seconds"] * (1 + c["sharp_base"])
        cost = min(cost, Cost(start + transfer + 2 * math.sqrt(c["sharp_fill"] * start * transfer), transfer))
    return cost


def _check(kind: str, nbytes: int, ranks: int, cluster: ClusterSpec, ranks_per_host: int | None) -> None:
    if kind not in COLLECTIVE_KINDS:
        raise InputError(f"collective_time({kind!r}): unknown collective; the kinds are {', '.join(COLLECTIVE_KINDS)}")
    if not isinstance(cluster, ClusterSpec):
        raise InputError(f"collective_time(cluster={cluster!r}): takes a ClusterSpec; find_cluster('dgx_h100') gives "
                         "one by name, cluster_of('h100') the usual one of a device")
    if type(ranks) is not int or ranks < 1:
        raise InputError(f"collective_time(ranks={ranks!r}): must be an int of 1 or more")
    if nbytes < 0:
        raise InputError(f"collective_time(nbytes={nbytes}): a size is not negative")
    if ranks_per_host is not None and not 1 <= ranks_per_host <= cluster.devices_per_host:
        raise InputError(f"collective_time(ranks_per_host={ranks_per_host!r}): hosts of {cluster.name!r} have 1 to "
                         f"{cluster.devices_per_host} ranks")


def _ring(kind: str, nbytes: int, ranks: int, path: Path, c: Mapping[str, float]) -> Cost:
    """A ring over all ranks: the fastest of the protocols that the links allow. Between hosts, a tree reduces."""
    steps, crossings = _RING[kind](ranks)
    hop, across = _hop(path, c), 0.0
    if path.domains > 1:
        hops = path.domains - 1 if kind != "all_reduce" else 2 * math.ceil(math.log2(path.domains))
        across = hops * hop
        steps = (path.ranks_per_domain - 1) * (1 if kind != "all_reduce" else 2)
        hop = 0.0 if path.inner is None else _hop(path.inner, c)
    start = c["base_seconds"] + across
    wire, blocks = nbytes * crossings, _RING[kind](ranks)[0]
    usable = _usable(path, ranks, c, "ring")
    transfer = wire * (1 + c["own_block"] / blocks) / usable
    # Simple flushes what a network wrote before it says so: twice the latency
    simple = (start + across + c["simple_base"] * c["base_seconds"] + steps * hop * c["simple_hop"] + transfer
              + 2 * math.sqrt(c["fill"] * start * transfer))
    low = wire / (c[f"{path.medium}_ll_share"] * usable)
    best = min(Cost(simple, transfer), Cost(start + steps * hop + low, low))
    if path.medium == "nvlink":
        middle = wire * (1 + c["ll128_own_block"] / blocks) / (c["ll128_share"] * path.bandwidth)
        best = min(best, Cost(start + c["ll128_base_seconds"] + steps * hop * c["ll128_hop"] + middle, middle))
    return best


def _sends(nbytes: int, ranks: int, path: Path, c: Mapping[str, float]) -> Cost:
    """Sends side by side: the rank that sends or receives most is what is waited for."""
    peers = ranks - 1
    wire, usable = nbytes * peers / ranks, _usable(path, ranks, c, "send")
    inner_seconds = 0.0
    start = c["base_seconds"] + c["send_hop"] * peers * _hop(path if path.domains == 1 else path.inner or path, c)
    if path.domains > 1:  # what leaves the domain takes the rank's own card, beside what stays inside
        usable /= path.ranks_per_domain
        start += _hop(path, c)
        outside = (ranks - path.ranks_per_domain) / peers
        if path.inner is not None:
            inner_seconds = wire * (1 - outside) / _usable(path.inner, path.ranks_per_domain, c, "send")
        wire *= outside
    transfer = max(wire * (1 + c["send_own_block"] / peers) / usable, inner_seconds)
    low = wire / (c["send_ll_share"] * usable)
    return min(Cost(start + c["send_base_seconds"] + transfer + 2 * math.sqrt(c["send_fill"] * start * transfer),
                    transfer), Cost(start + c["send_ll_base_seconds"] + low, low))


def _hop(path: Path, c: Mapping[str, float]) -> float:
    return path.hop_seconds or c[f"{path.medium}_hop_seconds"]


def _usable(path: Path, ranks: int, c: Mapping[str, float], algorithm: str) -> float:
    """Bytes/s of a rank that large transfers reach, no faster than within a domain."""
    if path.medium in _THROUGH_HOST:  # all ranks together share the way through the host's memory
        return c[f"{path.medium}_bandwidth"] / ranks
    rate = c[f"{path.medium}_{algorithm}_share"] * path.bandwidth
    if path.inner is not None:
        rate = min(rate, _usable(path.inner, path.ranks_per_domain, c, algorithm))
    return rate


_COHERENT_BANDWIDTH = 150e9  # above PCI Express 6.0 x16: NVLink-C2C, whose device reads pageable memory itself


def host_copy_time(nbytes: int, device: DeviceSpec, *, pinned: bool, to_device: bool) -> KernelTime | None:
    """Time of one copy of ``nbytes`` bytes between host and ``device``; None where the bus's bandwidth is unknown. The
    copy engine moves pinned memory at a share of the bus's rate. The driver moves pageable memory through a pinned
    buffer, at what the host copies beside; out of the device it is slower, since the pages of a fresh tensor are first
    touched then. On hosts with NVLink-C2C pageable memory is as good as pinned. Raises InputError for a negative size.
    """
    if nbytes < 0:
        raise InputError(f"host_copy_time(nbytes={nbytes}): a size is not negative")
    if device.pcie_bandwidth is None:
        return None
    if nbytes == 0:
        return NO_TIME
    c = find_constants("host_copy", device)
    direction = "to_device" if to_device else "from_device"
    rate, spread = c[f"pinned_{direction}_share"] * device.pcie_bandwidth, c["pinned_spread"]
    if not pinned and device.pcie_bandwidth < _COHERENT_BANDWIDTH:
        rate, spread = min(rate, c[f"pageable_{direction}_bandwidth"]), c["pageable_spread"]
    transfer, latency = nbytes / rate, c["latency_seconds"]
    return KernelTime(latency + transfer, spread, "communication" if transfer > latency else "latency")


def has_peer_access(device: DeviceSpec) -> bool:
    """Whether two devices of a usual host read each other's memory; False where they reach it through the host's."""
    path = find_path(cluster_of(device), 2, 2)
    return path is not None and path.medium not in _THROUGH_HOST


def peer_copy_time(nbytes: int, device: DeviceSpec) -> KernelTime | None:
    """Time of one copy of ``nbytes`` bytes from one device to another of a usual host (`cluster_of`); None where the
    link between them is unknown. It starts as soon as a copy from the host, and moves bytes at the rate that messages
    between two ranks reach, over the devices' own links, else over the bus or through the host's memory. Raises
    InputError for a negative size.
    """
    if nbytes < 0:
        raise InputError(f"peer_copy_time(nbytes={nbytes}): a size is not negative")
    path = find_path(cluster_of(device), 2, 2)
    if path is None:
        return None
    if nbytes == 0:
        return NO_TIME
    c = find_constants("collective", device)
    latency = find_constants("host_copy", device)["latency_seconds"]
    cost = Cost(latency + nbytes / _usable(path, 2, c, "pair"), nbytes / _usable(path, 2, c, "pair"))
    return KernelTime(cost.seconds, c[name_spread(path, cost)], "communication" if cost.transfer > latency else
                      "latency")
