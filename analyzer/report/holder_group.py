"""What holds memory, grouped by the class of the modules that made it."""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from analyzer.results.profile import Profile

from .column import format_quantity

_SHOWN = 10


class HolderGroup(NamedTuple):
    """What modules of one class hold for one purpose; ``type`` None is what no module made."""

    type: str | None
    category: str
    modules: int
    bytes: int

    def __str__(self) -> str:
        size = format_quantity(self.bytes, "bytes")
        if self.type is None:
            return f"{self.category}: {size}"
        return f"{self.modules:,} {self._name_type()}: {size} ({self.category})"

    @property
    def title(self) -> str:
        """What holds, without its size."""
        return self.category if self.type is None else f"{self.modules:,} {self._name_type()} ({self.category})"

    def _name_type(self) -> str:
        return f"{self.type}{'' if self.modules == 1 or str(self.type).endswith('s') else 's'}"


def group_holders(profile: Profile) -> list[HolderGroup]:
    """The holders of a profile by module class and category, largest first.

    >>> from analyzer.results.info import HolderInfo, ModuleInfo
    >>> modules = tuple(ModuleInfo(path=str(i), type="GELU", depth=1) for i in range(2))
    >>> held = (HolderInfo("a", "0", "activation", 100), HolderInfo("b", "1", "activation", 50))
    >>> p = Profile(name="demo", mode="train", holders=held, modules=ModuleInfo(path="", type="Net", children=modules))
    >>> print(*group_holders(p))
    2 GELUs: 150 B (activation)
    """
    types = {module.path: module.type for module in (() if profile.modules is None else profile.modules.walk())}
    found: dict[tuple[str | None, str], tuple[set[str], int]] = {}
    for holder in profile.holders:
        key = types.get(holder.module_path) if holder.module_path else None, holder.category
        paths, nbytes = found.get(key, (set(), 0))
        found[key] = paths | {holder.module_path}, nbytes + holder.bytes
    groups = [HolderGroup(*key, len(paths), nbytes) for key, (paths, nbytes) in found.items()]
    return sorted(groups, key=lambda group: -group.bytes)


def print_groups(groups: Iterable[HolderGroup]) -> str:
    """A line for each of the largest groups, and one for the rest together."""
    ordered = list(groups)
    lines = [str(group) for group in ordered[:_SHOWN]]
    rest = ordered[_SHOWN:]
    if rest:
        lines.append(f"{len(rest)} more: {format_quantity(sum(group.bytes for group in rest), 'bytes')}")
    return "\n".join(lines)
