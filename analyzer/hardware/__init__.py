"""Devices: what they can hold and do, where each figure comes from, and the least time that work takes on them."""
from .catalogue import find_device, register_device
from .cluster_spec import ClusterSpec, LinkSpec, cluster_of, find_cluster, register_cluster
from .device_spec import DeviceSpec, Figure, PeakRates
from .listing import find_peak, format_catalogue, format_device, roofline_seconds

__all__ = ["ClusterSpec", "DeviceSpec", "Figure", "LinkSpec", "PeakRates", "cluster_of", "find_cluster", "find_device",
           "find_peak", "format_catalogue", "format_device", "register_cluster", "register_device", "roofline_seconds"]
