"""The devices that can be named, and how to add one."""
from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from analyzer.errors import DuplicateRegistrationError, InputError, UnknownDeviceError
from analyzer.registry import Registry

from .device_file import is_device_file, list_shipped, read_device, read_shipped
from .device_spec import DeviceSpec

_VENDORS = ("NVIDIA", "AMD", "Apple", None)  # the order of the catalogue; the last is the host


class _Specs(Registry[str, Any]):  # Any: a registry's values are callables elsewhere, here they are specs
    """Specs by name, those that come with the package read at the first use."""

    def __init__(self) -> None:
        super().__init__("register_device")
        self.is_filled = False
        self._lock = threading.RLock()

    def fill(self) -> None:
        with self._lock:
            if not self.is_filled:
                self.is_filled = True
                shipped = [spec for name in list_shipped() if (spec := read_shipped(name)) is not None]
                for spec in sorted(shipped, key=_place):
                    self.add(_key(spec.name), spec)


def _place(spec: DeviceSpec) -> tuple[Any, ...]:
    """By vendor, the newest generation first, the largest memory first."""
    major, minor = spec.compute_capability or (0, 0)
    vendor = _VENDORS.index(spec.vendor) if spec.vendor in _VENDORS else len(_VENDORS)
    return vendor, -major, -minor, -(spec.memory_bytes or 0), spec.name


class DeviceCatalogue:
    """Devices by name and alias; case, spaces, hyphens and underscores do not tell names apart.

    Calling it registers a spec and returns it. A name that is taken is refused, unless ``override`` is true or the
    call stands inside ``scope()``, which undoes its registrations at the end; an alias of another device always is.

    >>> with register_device.scope():
    ...     _ = register_device(DeviceSpec("lab_card", aliases=("bench",)))
    ...     find_device("Bench")
    DeviceSpec('lab_card', cuda, -)
    """

    def __init__(self) -> None:
        self._specs = _Specs()
        self._named: dict[str, DeviceSpec] = {}
        self._named_version = -1

    def __call__(self, spec: DeviceSpec, *, override: bool = False) -> DeviceSpec:
        """Raises InputError if ``spec`` is not a DeviceSpec, DuplicateRegistrationError if a name of it is taken."""
        if not isinstance(spec, DeviceSpec):
            raise InputError(
                f"register_device({spec!r}): takes a DeviceSpec, for example DeviceSpec('lab_card', memory_bytes=24 * "
                "2**30)")
        key = _key(spec.name)
        named = self.by_key()
        for name in (spec.name, *spec.aliases):
            other = named.get(_key(name))
            if other is not None and _key(other.name) != key:
                raise DuplicateRegistrationError(
                    f"register_device({spec!r}): {name!r} already stands for {other!r}; give this device another name "
                    "or alias")
        self._specs(key, spec, override=override)
        return spec

    def scope(self) -> AbstractContextManager[None]:
        """Undo, at the end of the block, every registration made inside it."""
        return self._specs.scope()

    def __iter__(self) -> Iterator[DeviceSpec]:
        for key in self._specs:
            spec: Any = self._specs.find(key)
            yield spec

    def by_key(self) -> dict[str, DeviceSpec]:
        """Every device by each of its names, as they are compared."""
        self._specs.fill()
        if self._named_version != self._specs.version:
            version = self._specs.version
            self._named = {_key(name): spec for spec in self for name in (*spec.aliases, spec.name)}
            self._named_version = version
        return self._named

    def find(self, key: str) -> DeviceSpec | None:
        """The device that is known by ``key``. What comes with the package is read one by one until a list is asked."""
        if not self._specs.is_filled:
            spec = read_shipped(key)
            if spec is not None:
                return spec
        return self.by_key().get(key)


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


register_device = DeviceCatalogue()


def find_device(device: str | DeviceSpec) -> DeviceSpec:
    """The spec that ``device`` names, or ``device`` itself if it is one.

    Takes names of the catalogue, their aliases and what ``torch.cuda.get_device_name()`` returns for them, and the path
    of a JSON file as `read_device` reads it. Raises UnknownDeviceError with the nearest names, InputError for something
    that is not a name and for a file that describes no device.

    >>> find_device("H100"), find_device("NVIDIA A100-SXM4-80GB").name
    (DeviceSpec('h100_sxm', cuda, 79.19 GiB), 'a100_80gb')
    """
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str):
        raise InputError(f"find_device({device!r}): takes a name, for example 'h200', or a DeviceSpec")
    spec = register_device.find(_key(device))
    if spec is None and is_device_file(device):
        return read_device(device)
    if spec is None:
        named = register_device.by_key()
        close = dict.fromkeys(named[key].name for key in difflib.get_close_matches(_key(device), named, 6, 0.5))
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise UnknownDeviceError(
            f"unknown device {device!r}: {hint}The catalogue holds {', '.join(s.name for s in register_device)}; "
            "describe another one with DeviceSpec and pass it, or add it with register_device")
    return spec
