"""Devices: what they can hold and do, where each figure comes from, and the least time that work takes on them."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

from .catalogue import find_device, register_device, simulated_spec, simulating, split_devices
from .device_spec import DeviceSpec, Figure, PeakRates, encode_device, find_peak, is_device_file
from .unseen import UnseenMemory, list_unseen

if TYPE_CHECKING:
    from .cluster_spec import ClusterSpec, LinkSpec, cluster_of, find_cluster, register_cluster
    from .listing import format_catalogue, format_device, roofline_seconds

__all__ = ["ClusterSpec", "DeviceSpec", "Figure", "LinkSpec", "PeakRates", "UnseenMemory", "cluster_of",
           "encode_device", "find_cluster", "find_device", "find_peak", "format_catalogue", "format_device",
           "is_device_file", "list_unseen", "register_cluster", "register_device", "roofline_seconds", "simulated_spec",
           "simulating", "split_devices"]

# Tables of devices, which no profile needs; hosts and their links, which ranks communicate over.
__getattr__ = find_later(__name__, {
    "analyzer.hardware.cluster_spec": "ClusterSpec LinkSpec cluster_of find_cluster register_cluster",
    "analyzer.hardware.listing": "format_catalogue format_device roofline_seconds"})
