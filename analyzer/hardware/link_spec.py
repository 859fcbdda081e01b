"""What joins devices: NVLink, PCI Express, a network."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from analyzer.errors import InputError

from .device_spec import Figure, is_text_by_name, known_fields, suggest

#: ``"nvswitch"``: NVLink through switches, all to all at the full rate. ``"nvlink_mesh"``: NVLink from device to
#: device, so two of them share some of the links. ``"nvlink_bridge"``: cards joined two by two. ``"infinity_fabric"``:
#: AMD's links from device to device. ``"pcie"``, ``"nvlink_c2c"``: between a device and its host. ``"infiniband"``,
#: ``"ethernet"``: between hosts (``"ethernet"`` is RoCE, EFA and TCP alike).
LINK_KINDS = ("nvswitch", "nvlink_mesh", "nvlink_bridge", "infinity_fabric", "pcie", "nvlink_c2c", "infiniband",
              "ethernet")
_UNITS = {"devices": "", "bandwidth": "B/s", "latency_seconds": "s"}


@dataclass(frozen=True)
class LinkSpec:
    """What joins a number of devices.

    - ``kind``: one of `LINK_KINDS`.
    - ``bandwidth``: bytes/s of one device in one direction, all its links of this kind together.
    - ``devices``: how many devices are joined; None for a network, which joins any number.
    - ``latency_seconds``: of one hop; None where the kernels' own constants hold it.
    - ``reduces_in_switch``: whether the switches add up what they pass on (NVLink SHARP, InfiniBand SHARP).
    - ``has_peer_access``: False where devices reach each other through the host's memory only.
    - ``sources``: figure name to where it comes from.

    Raises InputError for a value that cannot be.

    >>> LinkSpec("nvswitch", 450e9, devices=8, reduces_in_switch=True).bandwidth
    450000000000.0
    >>> LinkSpec("wifi", 1e9)
    Traceback (most recent call last):
    analyzer.errors.InputError: LinkSpec(kind='wifi'): must be one of 'nvswitch', 'nvlink_mesh', 'nvlink_bridge', \
'infinity_fabric', 'pcie', 'nvlink_c2c', 'infiniband', 'ethernet'
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
            if name not in _UNITS:
                raise InputError(f"LinkSpec(sources={name!r}): not a figure{suggest(name, _UNITS)}; the figures are "
                                 f"{', '.join(_UNITS)}")
        object.__setattr__(self, "sources", dict(self.sources))  # a copy: the caller's dict may change

    def figures(self, prefix: str = "") -> Iterator[Figure]:
        """Every figure, known or not, named with ``prefix`` before it.

        >>> [figure.name for figure in LinkSpec("pcie", 64e9).figures("host_link.")][:2]
        ['host_link.devices', 'host_link.bandwidth']
        """
        for name, unit in _UNITS.items():
            yield Figure(prefix + name, getattr(self, name), unit, self.sources.get(name))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LinkSpec:
        """The link that ``dataclasses.asdict`` gave. Raises InputError for an unknown field or one that is missing."""
        fields = known_fields("LinkSpec", cls, data)
        for name in ("kind", "bandwidth"):
            if name not in data:
                raise InputError(f"LinkSpec.from_dict({dict(data)!r}): has no {name!r}")
        return cls(**fields)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
