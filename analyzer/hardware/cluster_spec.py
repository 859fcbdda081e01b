"""Devices in hosts, hosts in a cluster: what joins them, figure by figure, with where each figure comes from."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from analyzer.errors import InputError

from .catalogue import find_device
from .device_spec import DeviceSpec, Figure, is_text_by_name, known_fields
from .link_spec import LinkSpec

_LINKS = ("link", "host_link", "fabric")


@dataclass(frozen=True, repr=False)
class ClusterSpec:
    """Hosts of devices and what joins them. A link is None where it is unknown or there is none.

    - ``name``, ``aliases``: what ``find_cluster`` knows it by. ``device``: what every host holds.
    - ``devices_per_host``: devices of one host, of one operating system.
    - ``link``: the devices' own links: NVLink, Infinity Fabric. It may join fewer devices than a host holds (bridges
      between pairs) or more (a rack whose hosts share one NVLink switch).
    - ``host_link``: the bus between a device and its host, which devices without links of their own use among them.
    - ``fabric``: the network between hosts; its bandwidth is one device's share.
    - ``sources``: where ``devices_per_host`` comes from; each link has its own. ``note``: what else one should know.

    Raises InputError for a value that cannot be.

    >>> from analyzer.hardware import find_device
    >>> lab = ClusterSpec("lab", find_device("l4"), 4, host_link=LinkSpec("pcie", 32e9, devices=4),
    ...                   sources={"devices_per_host": "counted"})
    >>> lab
    ClusterSpec('lab', hosts of 4 l4)
    >>> ClusterSpec.from_dict(lab.to_dict()) == lab
    True
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
        """Every figure of the hosts and links, known or not; those of the device are ``device.figures()``.

        >>> from analyzer.hardware import find_cluster
        >>> [figure.value for figure in find_cluster("dgx_h100").figures()][:3]
        [8, 8, 450000000000.0]
        """
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
        """The spec that ``to_dict`` gave, also after a round trip through JSON; ``device`` may be a name.

        Raises InputError for an unknown field, a missing one or a value that cannot be.
        """
        fields = known_fields("ClusterSpec", cls, data)
        for name in ("name", "device"):
            if name not in data:
                raise InputError(f"ClusterSpec.from_dict({dict(data)!r}): has no {name!r}")
        device = fields["device"]
        fields["device"] = DeviceSpec.from_dict(device) if isinstance(device, Mapping) else find_device(device)
        for name in _LINKS:
            if isinstance(fields.get(name), Mapping):
                fields[name] = LinkSpec.from_dict(fields[name])
        return cls(**fields)
