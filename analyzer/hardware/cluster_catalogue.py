"""The clusters that can be named, how to add one, and the usual one of a device."""
from __future__ import annotations

import functools
import json
from importlib import resources

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.saved_format import load_json

from .catalogue import SpecCatalogue, find_device, fold_name
from .cluster_spec import ClusterSpec, LinkSpec
from .device_file import is_device_file, list_shipped
from .device_spec import DeviceSpec

_PER_HOST = 8
# What the usual design gives each device of a host: bytes/s of the network in one direction, by compute capability.
_FABRICS = (((10, 3), 100e9, "ConnectX-8 of 800 Gb/s, as in DGX B300"), ((9, 0), 50e9, "400 Gb/s, as in DGX H100"),
            ((8, 0), 25e9, "200 Gb/s, as in DGX A100"), ((0, 0), 12.5e9, "100 Gb/s"))
_SHARP_CAPABILITY = (9, 0)  # NVSwitch of the third generation: NVIDIA Hopper architecture whitepaper, NVLink Network
_SWITCHED_CAPABILITY = (8, 0)  # before, NVLink ran from device to device (DGX-1), or was rarely switched (DGX-2)
_RACKS = {"gb200": "gb200_nvl72", "gb300": "gb300_nvl72"}
_ALONE = frozenset(("gh200_96gb", "gh200_144gb"))  # hosts of one device


def _read_all() -> list[ClusterSpec]:
    folder = resources.files(__package__).joinpath("clusters")
    return [ClusterSpec.from_dict(json.loads(folder.joinpath(f"{name}.json").read_text("utf-8")))
            for name in list_shipped("clusters")]


register_cluster = SpecCatalogue(
    ClusterSpec, "cluster", "ClusterSpec('lab', find_device('l4'), 4, host_link=LinkSpec('pcie', 32e9))", _read_all,
    lambda name: fold_name(name.replace(".", "_")))  # instances of clouds have dots in their names
"""Add a `ClusterSpec` to the catalogue, so that its name is known wherever a cluster is named."""


def find_cluster(cluster: str | ClusterSpec) -> ClusterSpec:
    """The spec that ``cluster`` is or names: a name of the catalogue, an alias, or the path of a JSON file that holds
    ``ClusterSpec.to_dict()``. Raises InputError with the nearest names for an unknown one.
    """
    if isinstance(cluster, ClusterSpec):
        return cluster
    if not isinstance(cluster, str):
        raise InputError(f"find_cluster({cluster!r}): takes a name, for example 'dgx_h100', or a ClusterSpec")
    if not is_device_file(cluster):
        spec = register_cluster.find(cluster)
        if spec is None:
            raise InputError(
                f"unknown cluster {cluster!r}: {register_cluster.list_near(cluster, 4)}; cluster_of('h100') gives the "
                "usual one of a device; describe another one with ClusterSpec and pass it, or add it with "
                "register_cluster")
        return spec
    try:
        data = load_json(cluster)
    except (OSError, ValueError) as error:
        raise InputError(f"cluster file {cluster!r}: cannot be read as JSON: {error}; ClusterSpec.to_dict gives what "
                         "json.dump is to write") from error
    if not isinstance(data, dict):
        raise InputError(f"cluster file {cluster!r}: holds a {type(data).__name__}, not the fields of a ClusterSpec by "
                         "name")
    try:
        return ClusterSpec.from_dict(data)
    except (InputError, UnknownDeviceError) as error:
        raise InputError(f"cluster file {cluster!r}: {error}") from error


def cluster_of(device: str | DeviceSpec) -> ClusterSpec:
    """The cluster that a device usually stands in: hosts of 8 with its data sheet's links; the network is assumed.
    NVLink is taken to be switched from Ampere on and to reduce in the switch from Hopper on; devices without links of
    their own use PCI Express, with peer access. GB200 and GB300 stand in racks of 72. Each figure's source says what is
    assumed.
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
