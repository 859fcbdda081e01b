"""The clusters that can be named, how to add one, and the usual one of a device."""
from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Any

from analyzer.errors import DuplicateRegistrationError, InputError
from analyzer.registry import Registry

from .catalogue import find_device
from .cluster_spec import ClusterSpec
from .device_file import is_device_file
from .device_spec import DeviceSpec
from .link_spec import LinkSpec

_PER_HOST = 8
# What the usual design gives each device of a host: bytes/s of the network in one direction, by compute capability.
_FABRICS = (((10, 3), 100e9, "ConnectX-8 of 800 Gb/s, as in DGX B300"), ((9, 0), 50e9, "400 Gb/s, as in DGX H100"),
            ((8, 0), 25e9, "200 Gb/s, as in DGX A100"), ((0, 0), 12.5e9, "100 Gb/s"))
_SHARP_CAPABILITY = (9, 0)  # NVSwitch of the third generation: NVIDIA Hopper architecture whitepaper, NVLink Network
_SWITCHED_CAPABILITY = (8, 0)  # before, NVLink ran from device to device (DGX-1), or was rarely switched (DGX-2)
_RACKS = {"gb200": "gb200_nvl72", "gb300": "gb300_nvl72"}
_ALONE = frozenset(("gh200_96gb", "gh200_144gb"))  # hosts of one device


class _Specs(Registry[str, Any]):  # Any: a registry's values are callables elsewhere, here they are specs
    """Specs by name, those that come with the package read at the first use."""

    def __init__(self) -> None:
        super().__init__("register_cluster")
        self._is_filled = False

    def fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            for name in _list_shipped():
                self.add(_key(name), _read_shipped(name))


def _list_shipped() -> list[str]:
    files = resources.files(__package__).joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


@functools.cache
def _read_shipped(name: str) -> ClusterSpec:
    text = resources.files(__package__).joinpath(f"clusters/{name}.json").read_text("utf-8")
    return ClusterSpec.from_dict(json.loads(text))


def _key(name: str) -> str:
    return re.sub(r"[\s_.-]+", "_", name.strip().casefold())


class ClusterCatalogue:
    """Clusters by name and alias; case, spaces, dots, hyphens and underscores do not tell names apart.

    Calling it registers a spec and returns it. A name that is taken is refused, unless ``override`` is true or the
    call stands inside ``scope()``, which undoes its registrations at the end; an alias of another cluster always is.

    >>> from analyzer.hardware import find_device
    >>> with register_cluster.scope():
    ...     _ = register_cluster(ClusterSpec("lab", find_device("l4"), 2))
    ...     find_cluster("Lab")
    ClusterSpec('lab', hosts of 2 l4)
    """

    def __init__(self) -> None:
        self._specs = _Specs()
        self._named: dict[str, ClusterSpec] = {}
        self._named_version = -1

    def __call__(self, spec: ClusterSpec, *, override: bool = False) -> ClusterSpec:
        """Raises InputError if ``spec`` is not a ClusterSpec, DuplicateRegistrationError if a name of it is taken."""
        if not isinstance(spec, ClusterSpec):
            raise InputError(f"register_cluster({spec!r}): takes a ClusterSpec, for example ClusterSpec('lab', "
                             "find_device('l4'), 4, host_link=LinkSpec('pcie', 32e9))")
        key, named = _key(spec.name), self.by_key()
        for name in (spec.name, *spec.aliases):
            other = named.get(_key(name))
            if other is not None and _key(other.name) != key:
                raise DuplicateRegistrationError(f"register_cluster({spec!r}): {name!r} already stands for {other!r}; "
                                                 "give this cluster another name or alias")
        self._specs(key, spec, override=override)
        return spec

    def scope(self) -> AbstractContextManager[None]:
        """Undo, at the end of the block, every registration made inside it."""
        return self._specs.scope()

    def __iter__(self) -> Iterator[ClusterSpec]:
        for key in self._specs:
            spec: Any = self._specs.find(key)
            yield spec

    def by_key(self) -> dict[str, ClusterSpec]:
        """Every cluster by each of its names, as they are compared."""
        self._specs.fill()
        if self._named_version != self._specs.version:
            version = self._specs.version
            self._named = {_key(name): spec for spec in self for name in (*spec.aliases, spec.name)}
            self._named_version = version
        return self._named


register_cluster = ClusterCatalogue()


def find_cluster(cluster: str | ClusterSpec) -> ClusterSpec:
    """The spec that ``cluster`` names, or ``cluster`` itself if it is one.

    Takes names of the catalogue, their aliases, and the path of a JSON file that holds ``ClusterSpec.to_dict()``.
    Raises InputError with the nearest names for one that is unknown, and for something that is not a name.

    >>> find_cluster("DGX-H100"), find_cluster("p5.48xlarge").name
    (ClusterSpec('dgx_h100', hosts of 8 h100_sxm), 'aws_p5')
    """
    if isinstance(cluster, ClusterSpec):
        return cluster
    if not isinstance(cluster, str):
        raise InputError(f"find_cluster({cluster!r}): takes a name, for example 'dgx_h100', or a ClusterSpec")
    if is_device_file(cluster):
        return _read_cluster(cluster)
    named = register_cluster.by_key()
    spec = named.get(_key(cluster))
    if spec is None:
        close = dict.fromkeys(named[key].name for key in difflib.get_close_matches(_key(cluster), named, 4, 0.5))
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise InputError(
            f"unknown cluster {cluster!r}: {hint}The catalogue holds {', '.join(s.name for s in register_cluster)}; "
            "cluster_of('h100') gives the usual one of a device; describe another one with ClusterSpec and pass it, or "
            "add it with register_cluster")
    return spec


def _read_cluster(path: str) -> ClusterSpec:
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cluster file {path!r}: cannot be read as JSON: {error}; ClusterSpec.to_dict gives what "
                         "json.dump is to write") from error
    if not isinstance(data, dict):
        raise InputError(f"cluster file {path!r}: holds a {type(data).__name__}, not the fields of a ClusterSpec by "
                         "name")
    try:
        return ClusterSpec.from_dict(data)
    except InputError as error:
        raise InputError(f"cluster file {path!r}: {error}") from error


def cluster_of(device: str | DeviceSpec) -> ClusterSpec:
    """The cluster that a device usually stands in: hosts of 8 with its data sheet's links; the network is assumed.

    NVLink is taken to be switched from Ampere on and to reduce in the switch from Hopper on; devices without links of
    their own use PCI Express, with peer access. GB200 and GB300 stand in racks of 72. Each figure's source says what
    is assumed.

    >>> cluster = cluster_of("h200")
    >>> cluster.link.kind, cluster.link.bandwidth, cluster.fabric.bandwidth
    ('nvswitch', 450000000000.0, 50000000000.0)
    """
    spec = find_device(device)
    return find_cluster(_RACKS[spec.name]) if spec.name in _RACKS else _usual(spec)


@functools.lru_cache(maxsize=64)
def _usual(device: DeviceSpec) -> ClusterSpec:
    capability = device.compute_capability or (0, 0)
    per_host = 1 if device.name in _ALONE or device.kind == "cpu" else _PER_HOST
    rate, design = next((rate, design) for least, rate, design in _FABRICS if capability >= least)
    fabric = LinkSpec("infiniband", rate, sources={"bandwidth": f"assumed: {design}"})
    assumed = f"assumed: hosts of {per_host}"
    link = host_link = None
    if device.nvlink_bandwidth is not None and per_host > 1:
        kind = ("infinity_fabric" if device.vendor == "AMD" else
                "nvswitch" if capability >= _SWITCHED_CAPABILITY else "nvlink_mesh")
        reduces = kind == "nvswitch" and capability >= _SHARP_CAPABILITY
        link = LinkSpec(kind, device.nvlink_bandwidth, per_host, reduces_in_switch=reduces,
                        sources=_sources(device, "nvlink_bandwidth", assumed))
    if device.pcie_bandwidth is not None:
        sources = _sources(device, "pcie_bandwidth", assumed)
        host_link = (LinkSpec("pcie", device.pcie_bandwidth, per_host, sources=sources) if per_host > 1 else
                     LinkSpec("nvlink_c2c", device.pcie_bandwidth, sources=sources))
    return ClusterSpec(f"{device.name}_hosts", device, per_host, link, host_link, fabric,
                       sources={"devices_per_host": assumed})


def _sources(device: DeviceSpec, name: str, assumed: str) -> dict[str, str]:
    return {"bandwidth": device.sources.get(name, "the device's specification"), "devices": assumed}
