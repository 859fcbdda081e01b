"""The device that a profile was made for, also where no catalogue has it."""
from __future__ import annotations

from typing import Any

from analyzer.hardware import DeviceSpec, find_device

from .deferred import DeferredFields


class DeviceRecord(DeferredFields):
    """A record with the name of a device, which keeps the spec of one that does not come with the package. Copies and
    pickles have it too; what is saved as JSON has the name alone.
    """

    __slots__ = ("_device_spec",)
    device: str | None

    @property
    def own_device(self) -> DeviceSpec | None:
        """The spec that is kept; None for a device that comes with the package and for a record that was read."""
        return getattr(self, "_device_spec", None)

    def keep_device(self, spec: DeviceSpec | None) -> None:
        """Keep a spec, for which ``device`` stands."""
        object.__setattr__(self, "_device_spec", spec)

    def find_device(self, device: str | DeviceSpec) -> DeviceSpec:
        """The spec of ``device``, which may be this record's own by name. Raises UnknownDeviceError."""
        own = self.own_device
        return own if own is not None and device == self.device else find_device(device)

    def __reduce__(self) -> Any:  # a dataclass with slots writes the states of its fields alone
        return _restore, (type(self), self.__getstate__(), self.own_device)


def _restore(cls: type[DeviceRecord], state: list[Any], own: DeviceSpec | None) -> DeviceRecord:
    record = cls.__new__(cls)
    record.__setstate__(state)
    record.keep_device(own)
    return record
