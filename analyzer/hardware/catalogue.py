"""The devices that come with the package, those of files, and the one that this thread simulates."""
from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from analyzer.errors import InputError, UnknownDeviceError

from .device_file import is_device_file, list_shipped, read_device, read_shipped
from .device_spec import DeviceSpec
from .spec_catalogue import SpecCatalogue, fold_name

# The devices that can be named, and how to add one.

_VENDORS = ("NVIDIA", "AMD", "Apple", None)  # the order of the catalogue; the last is the host


def _place(spec: DeviceSpec) -> tuple[Any, ...]:
    """By vendor, the newest generation first, the largest memory first."""
    major, minor = spec.compute_capability or (0, 0)
    vendor = _VENDORS.index(spec.vendor) if spec.vendor in _VENDORS else len(_VENDORS)
    return vendor, -major, -minor, -(spec.memory_bytes or 0), spec.name


def _read_all() -> list[DeviceSpec]:
    return sorted((spec for name in list_shipped() if (spec := read_shipped(name)) is not None), key=_place)


class DeviceCatalogue(SpecCatalogue[DeviceSpec]):
    """Devices by name and alias; case, spaces, hyphens and underscores do not tell names apart. See `SpecCatalogue`.

    >>> with register_device.scope():
    ...     _ = register_device(DeviceSpec("lab_card", aliases=("bench",)))
    ...     find_device("Bench")
    DeviceSpec('lab_card', cuda, -)
    """

    def __init__(self) -> None:
        super().__init__(DeviceSpec, "device", "DeviceSpec('lab_card', memory_bytes=24 * 2**30)", _read_all)

    def find(self, name: str) -> DeviceSpec | None:
        """The device of that name. What comes with the package is read one by one until a list is asked for."""
        key = fold_name(name)
        shipped = None if self.is_filled else read_shipped(key)
        return self.by_key().get(key) if shipped is None else shipped


register_device = DeviceCatalogue()
"""Add a `DeviceSpec` to the catalogue, so that its name is known wherever a device is named."""


@contextmanager
def knowing(device: object) -> Iterator[None]:
    """For the length of a block, know the device that a file describes by its name, which is all that a profile keeps
    of it, unless the catalogue has that name. Nothing for what is no file.
    """
    if not isinstance(device, str) or not is_device_file(device):
        yield
        return
    with register_device.scope():
        spec = find_device(device)
        if register_device.find(spec.name) is None:
            register_device(dataclasses.replace(spec, aliases=()))  # those may be the catalogue's
        yield


def find_device(device: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """The spec that ``device`` names, or ``device`` itself if it is one.

    Takes names of the catalogue, their aliases and what ``torch.cuda.get_device_name()`` returns for them, and the path
    of a JSON file as `read_device` reads it. Raises UnknownDeviceError with the nearest names, InputError for something
    that is not a name and for a file that describes no device.

    >>> find_device("H100"), find_device("NVIDIA A100-SXM4-80GB").name
    (DeviceSpec('h100_sxm', cuda, 79.19 GiB), 'a100_80gb')
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, os.PathLike):
        return read_device(device)
    if not isinstance(device, str):
        raise InputError(f"find_device({device!r}): takes a name, for example 'h200', the path of a "
                         "file, or a DeviceSpec")
    spec = register_device.find(device)
    if spec is None and is_device_file(device):
        return read_device(device)
    if spec is None and device.partition(":")[0].lower() in ("cuda", "gpu", "mps", "hip", "rocm"):
        raise UnknownDeviceError(f"device {device!r}: a prediction is for one model of device; give its name, e.g. "
                                 "rtx_4090, h100 or m2_max, or what torch.cuda.get_device_name() says where it is; "
                                 "`analyzer devices` lists those that are known")
    if spec is None:
        raise UnknownDeviceError(f"unknown device {device!r}: {register_device.list_near(device, 6)}; describe another "
                                 "one with DeviceSpec and pass it, or add it with register_device")
    return spec


# The device that this thread simulates: rules that depend on a device's generation read it here.

class _Simulated(threading.local):
    spec: DeviceSpec | None = None


_simulated = _Simulated()


def simulated_spec() -> DeviceSpec:
    """The device that is simulated; an H200 unless `simulating` named another."""
    return _simulated.spec or find_device("h200")


@contextmanager
def simulating(spec: DeviceSpec) -> Iterator[None]:
    """Simulate ``spec`` for the length of a block."""
    before, _simulated.spec = _simulated.spec, spec
    try:
        yield
    finally:
        _simulated.spec = before
