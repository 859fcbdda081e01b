"""Devices: what they can hold and do, where each figure comes from, and the least time that work takes on them."""
from .catalogue import find_device, register_device
from .device_spec import DeviceSpec, Figure, PeakRates
from .listing import format_catalogue, format_device
from .roofline import collective_seconds, find_peak, roofline_seconds

__all__ = ["DeviceSpec", "Figure", "PeakRates", "collective_seconds", "find_device", "find_peak", "format_catalogue",
           "format_device", "register_device", "roofline_seconds"]
