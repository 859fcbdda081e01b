"""Hosts, links and clusters of devices; the clusters that can be named, and the usual one of a device."""
from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from analyzer.errors import InputError
from analyzer.saved_format import load_json

from .catalogue import SpecCatalogue, find_device, fold_name, split_figures
from .device_spec import (
    DeviceSpec,
    Figure,
    is_device_file,
    is_text_by_name,
    known_fields,
    list_shipped,
    make_spec,
    suggest,
)
from .kernel_time.estimate import find_constants


@dataclass(frozen=True)
class HostSpec:
    """The pace of a host that runs a PyTorch step, seconds each.

    - ``module_seconds``: a call of a module: Python's own work, hooks looked up.
    - ``forward_seconds``, ``backward_seconds``, ``update_seconds``: an operator called by the model's code, by
      autograd's engine, by the optimizer, without the launch of kernels. ``gradient_seconds``: more while gradients are
      recorded.
    - ``list_tensor_seconds``: a tensor in the lists of an operator (``_foreach_*``, ``_fused_*``).
    - ``library_seconds``: a convolution more, as cuDNN looks up its plan. ``checkpoint_seconds``: more for each tensor
      that a checkpointed region would save, both times: the hooks that pack it.
    - ``launch_seconds``: a kernel given to the driver. ``gap_seconds``: between two kernels of a full queue.
    - ``synchronize_seconds``: from a kernel's end to the host's going on after it waited for it.
    - ``spread``: nine in ten measured hosts take at most that part more for all of it, or less by the same factor.
    """

    module_seconds: float
    forward_seconds: float
    gradient_seconds: float
    backward_seconds: float
    update_seconds: float
    list_tensor_seconds: float
    library_seconds: float
    checkpoint_seconds: float
    launch_seconds: float
    gap_seconds: float
    synchronize_seconds: float
    spread: float


def host_of(device: DeviceSpec) -> HostSpec:
    """The host that a device is assumed to stand in: its own calibration, else the one of the fit."""
    constants = find_constants("host", device)
    return HostSpec(**{field.name: constants[field.name] for field in dataclasses.fields(HostSpec)})


#: ``"nvswitch"``: NVLink through switches, all to all at the full rate. ``"nvlink_mesh"``: NVLink from device to
#: device, so two of them share some of the links. ``"nvlink_bridge"``: cards joined two by two. ``"infinity_fabric"``:
#: AMD's links from device to device. ``"pcie"``, ``"nvlink_c2c"``: between a device and its host. ``"infiniband"``,
#: ``"ethernet"``: between hosts (``"ethernet"`` is RoCE, EFA and TCP alike).
LINK_KINDS = ("nvswitch", "nvlink_mesh", "nvlink_bridge", "infinity_fabric", "pcie", "nvlink_c2c", "infiniband",
              "ethernet")
_UNITS = {"devices": "", "bandwidth": "B/s", "latency_seconds": "s"}


@dataclass(frozen=True)
class LinkSpec:
    """What joins a number of devices. Raises InputError for a value that cannot be.

    - ``kind``: one of `LINK_KINDS`. ``bandwidth``: bytes/s of one device in one direction, all its links together.
    - ``devices``: how many are joined; None for a network, which joins any number.
    - ``latency_seconds``: of one hop; None where the kernels' own constants hold it.
    - ``reduces_in_switch``: whether the switches add up what they pass on (NVLink SHARP, InfiniBand SHARP).
    - ``has_peer_access``: False where devices reach each other through the host's memory only.
    - ``sources``: figure name to where it comes from; also of ``has_peer_access``, which is assumed where none is told.
    """

    kind: str
    bandwidth: float
    devices: int | None = None
    latency_seconds: float | None = None
    reduces_in_switch: bool = False
    has_peer_access: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, is_right, problem in (
                ("kind", self.kind in LINK_KINDS, f"must be one of {', '.join(map(repr, LINK_KINDS))}"),
                ("bandwidth", _is_positive(self.bandwidth), "must be a positive number, in B/s"),
                ("devices", self.devices is None or type(self.devices) is int and self.devices >= 2,
                 "must be an int of 2 or more, or None for any number"),
                ("latency_seconds", self.latency_seconds is None or _is_positive(self.latency_seconds),
                 "must be a positive number, in s, or None if unknown"),
                ("reduces_in_switch", isinstance(self.reduces_in_switch, bool), "must be a bool"),
                ("has_peer_access", isinstance(self.has_peer_access, bool), "must be a bool"),
                ("sources", is_text_by_name(self.sources), "must say by the names of figures where each comes from")):
            if not is_right:
                raise InputError(f"LinkSpec({name}={getattr(self, name)!r}): {problem}")
        for name in self.sources:
            if name not in _UNITS and name != "has_peer_access":
                raise InputError(f"LinkSpec(sources={name!r}): not a figure{suggest(name, _UNITS)}; the figures are "
                                 f"{', '.join(_UNITS)}")
        object.__setattr__(self, "sources", dict(self.sources))  # a copy: the caller's dict may change

    def figures(self, prefix: str = "") -> Iterator[Figure]:
        """Every figure, known or not, named with ``prefix`` before it."""
        for name, unit in _UNITS.items():
            yield Figure(prefix + name, getattr(self, name), unit, self.sources.get(name))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LinkSpec:
        """The link that ``dataclasses.asdict`` gave. Raises InputError for an unknown field or one that is missing."""
        return cls(**known_fields("LinkSpec", cls, data, "kind", "bandwidth"))


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


_LINKS = ("link", "host_link", "fabric")


@dataclass(frozen=True, repr=False)
class ClusterSpec:
    """Hosts of devices and what joins them; a link is None where it is unknown or there is none. Raises InputError for
    a value that cannot be.

    - ``name``, ``aliases``: what ``find_cluster`` knows it by. ``device``: what every host holds.
    - ``link``: the devices' own links: NVLink, Infinity Fabric. It may join fewer devices than a host holds (bridges
      between pairs) or more (a rack whose hosts share one NVLink switch).
    - ``host_link``: the bus between a device and its host, which devices without links of their own use among them.
    - ``fabric``: the network between hosts; its bandwidth is one device's share.
    - ``sources``: where ``devices_per_host`` comes from; each link has its own. ``note``: what else one should know.
    """

    name: str
    device: DeviceSpec
    devices_per_host: int = 8
    link: LinkSpec | None = None
    host_link: LinkSpec | None = None
    fabric: LinkSpec | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    note: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(f"ClusterSpec(name={self.name!r}): must be a name that is not blank")
        for field_name, is_right, problem in (
                ("device", isinstance(self.device, DeviceSpec), "must be a DeviceSpec; find_device('h100') gives one"),
                ("devices_per_host", type(self.devices_per_host) is int and self.devices_per_host >= 1,
                 "must be an int of 1 or more"),
                ("aliases", isinstance(self.aliases, (tuple, list))
                 and all(isinstance(a, str) and a.strip() for a in self.aliases), "must be a tuple of names"),
                ("note", isinstance(self.note, str | None), "must be a text or None"),
                ("sources", is_text_by_name(self.sources), "must say by the name of the figure where it comes from"),
                *((name, getattr(self, name) is None or isinstance(getattr(self, name), LinkSpec),
                   "must be a LinkSpec, or None if unknown or absent") for name in _LINKS)):
            if not is_right:
                raise self._error(field_name, getattr(self, field_name), problem)
        for name in self.sources:
            if name != "devices_per_host":
                raise self._error("sources", name, "not a figure of the cluster itself, which is 'devices_per_host'; "
                                                   "a link's sources stand in its LinkSpec")
        object.__setattr__(self, "aliases", tuple(self.aliases))  # JSON brings lists
        object.__setattr__(self, "sources", dict(self.sources))  # a copy: the caller's dict may change

    def _error(self, field_name: str, value: object, problem: str) -> InputError:
        return InputError(f"ClusterSpec({self.name!r}, {field_name}={value!r}): {problem}")

    def __repr__(self) -> str:
        return f"ClusterSpec({self.name!r}, hosts of {self.devices_per_host} {self.device.name})"

    def figures(self) -> Iterator[Figure]:
        """Every figure of the hosts and links, known or not; those of the device are ``device.figures()``."""
        yield Figure("devices_per_host", self.devices_per_host, "", self.sources.get("devices_per_host"))
        for name in _LINKS:
            link = getattr(self, name)
            if link is not None:
                yield from link.figures(f"{name}.")

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data that ``json.dumps`` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClusterSpec:
        """The spec that ``to_dict`` gave, also after JSON; ``device`` may be a name. Raises InputError."""
        fields = known_fields("ClusterSpec", cls, data, "name", "device")
        device = fields["device"]
        fields["device"] = DeviceSpec.from_dict(device) if isinstance(device, Mapping) else find_device(device)
        for name in _LINKS:
            if isinstance(fields.get(name), Mapping):
                fields[name] = LinkSpec.from_dict(fields[name])
        return cls(**fields)


_PER_HOST = 8
# What the usual design gives each device of a host: bytes/s of the network in one direction, by compute capability.
_FABRICS = (((10, 3), 100e9, "ConnectX-8 of 800 Gb/s, as in DGX B300"), ((9, 0), 50e9, "400 Gb/s, as in DGX H100"),
            ((8, 0), 25e9, "200 Gb/s, as in DGX A100"), ((0, 0), 12.5e9, "100 Gb/s"))
_SHARP_CAPABILITY = (9, 0)  # NVSwitch of the third generation: NVIDIA Hopper architecture whitepaper, NVLink Network
_SWITCHED_CAPABILITY = (8, 0)  # before, NVLink ran from device to device (DGX-1), or was rarely switched (DGX-2)
_RACKS = {"gb200": "gb200_nvl72", "gb300": "gb300_nvl72"}
_ALONE = frozenset(("gh200_96gb", ))  # hosts of one device


register_cluster = SpecCatalogue(
    ClusterSpec, "cluster", "ClusterSpec('lab', find_device('l4'), 4, host_link=LinkSpec('pcie', 32e9))",
    lambda: [ClusterSpec.from_dict(json.loads(resources.files(__package__).joinpath(f"clusters/{name}.json").read_text(
        "utf-8"))) for name in list_shipped("clusters")],
    lambda name: fold_name(name.replace(".", "_")))  # instances of clouds have dots in their names
"""Add a `ClusterSpec` to the catalogue, so that its name is known wherever a cluster is named."""


#: What may follow the name of a cluster, by its key, which is the link's.
_TOLD = {"fabric": "infiniband", "link": "nvswitch", "host_link": "pcie"}


def _read_figures(cluster: str) -> ClusterSpec:
    """The cluster that ``NAME,KEY=VALUE,...`` tells: that of the name but for these figures. The name may be that of a
    device, with figures of its board: its usual hosts are meant.
    """
    name, words = split_figures(cluster)
    board = {key: words.pop(key) for key in list(words) if key not in ("devices_per_host", *_TOLD)}
    known = register_cluster.find(name)
    device = find_device(",".join([known.device.name if known else name, *map("=".join, board.items())]))
    spec = dataclasses.replace(known, device=device) if known else cluster_of(device)
    told: dict[str, Any] = {}
    for key, text in words.items():
        try:
            value = int(text) if key == "devices_per_host" else float(text)
        except ValueError:
            raise InputError(f"cluster {cluster!r}: {key}={text} must be a number"
                             f"{'' if key == 'devices_per_host' else ', in B/s of one device'}") from None
        if key in _TOLD:
            link = getattr(spec, key) or LinkSpec(_TOLD[key], 1.0)
            told[key] = dataclasses.replace(link, bandwidth=value, sources={
                **link.sources, "bandwidth": f"told by {cluster!r}"})
        else:
            told[key] = value
    return dataclasses.replace(spec, **told, name=cluster, aliases=())


def find_cluster(cluster: str | ClusterSpec) -> ClusterSpec:
    """The spec that ``cluster`` is or names: a name, an alias, or the path of a JSON file. Figures may follow a name,
    or that of a device, whose usual hosts they are: ``fabric``, ``link``, ``host_link`` (B/s of one device in one
    direction), ``devices_per_host``. Raises InputError.

    >>> find_cluster("dgx_h100,fabric=25e9").fabric.bandwidth, find_cluster("h100,devices_per_host=4")
    (25000000000.0, ClusterSpec('h100,devices_per_host=4', hosts of 4 h100_sxm))
    """
    if isinstance(cluster, ClusterSpec):
        return cluster
    if not isinstance(cluster, str):
        raise InputError(f"find_cluster({cluster!r}): takes a name, for example 'dgx_h100', or a ClusterSpec")
    if not is_device_file(cluster):
        spec = register_cluster.find(cluster)
        if spec is None and "=" in cluster:
            return _read_figures(cluster)
        if spec is None:
            raise InputError(
                f"unknown cluster {cluster!r}: {register_cluster.list_near(cluster, 4)}; cluster_of('h100') gives the "
                "usual one of a device; describe another one with ClusterSpec and pass it, or add it with "
                "register_cluster")
        return spec
    try:
        data = load_json(cluster)
    except (OSError, ValueError) as error:
        raise InputError(f"cluster file {cluster!r}: cannot be read as JSON: {error}; write it by json.dump "
                         "of ClusterSpec.to_dict()") from error
    return make_spec(f"cluster file {cluster!r}", data, ClusterSpec, ClusterSpec.from_dict)


def cluster_of(device: str | DeviceSpec) -> ClusterSpec:
    """The cluster that a device usually stands in: hosts of 8 with its data sheet's links; the network is assumed.
    NVLink is assumed to be switched from Ampere on and to reduce in the switch from Hopper on; devices without links of
    their own use PCI Express, with peer access. GB200 and GB300 stand in racks of 72. Each figure's source says what is
    assumed.
    """
    spec = find_device(device)
    rack = _RACKS.get(spec.chip)
    return _usual(spec) if rack is None else dataclasses.replace(find_cluster(rack), device=spec)


@functools.lru_cache(maxsize=64)
def _usual(device: DeviceSpec) -> ClusterSpec:
    capability = device.compute_capability or (0, 0)
    per_host = 1 if device.chip in _ALONE or device.kind == "cpu" else _PER_HOST
    rate, design = next((rate, design) for least, rate, design in _FABRICS if capability >= least)
    fabric = LinkSpec("infiniband", rate, sources={"bandwidth": f"assumed: {design}"})
    assumed = f"assumed: hosts of {per_host}"
    links, pcie = ({"bandwidth": device.sources.get(name, "the device's specification"), "devices": assumed}
                   for name in ("nvlink_bandwidth", "pcie_bandwidth"))
    link = host_link = None
    if device.nvlink_bandwidth is not None and per_host > 1:
        kind = ("infinity_fabric" if device.vendor == "AMD" else
                "nvswitch" if capability >= _SWITCHED_CAPABILITY else "nvlink_mesh")
        reduces = kind == "nvswitch" and capability >= _SHARP_CAPABILITY
        link = LinkSpec(kind, device.nvlink_bandwidth, per_host, reduces_in_switch=reduces, sources=links)
    if device.pcie_bandwidth is not None:
        host_link = (LinkSpec("pcie", device.pcie_bandwidth, per_host, sources=pcie) if per_host > 1 else
                     LinkSpec("nvlink_c2c", device.pcie_bandwidth, sources=pcie))
    return ClusterSpec(f"{device.name}_hosts", device, per_host, link, host_link, fabric,
                       sources={"devices_per_host": assumed})
