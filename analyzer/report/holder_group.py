"""What holds memory and what ranks communicate, as text."""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import CommTotal, sum_communication
from analyzer.results.view import register_report
from analyzer.results.world import WorldInfo
from analyzer.units import add_quantities

from .text_table import Column, check_layout, format_quantity, print_rows

_SHOWN = 10
_LINE = re.compile(r"\.py:\d+")


class HolderGroup(NamedTuple):
    """What modules of one class hold for one purpose; ``type`` None is what no module made."""

    type: str | None
    category: str
    modules: int
    bytes: int
    line: str | None = None  #: of a script, "train.py:12", where no module made it

    def __str__(self) -> str:
        size = format_quantity(self.bytes, "bytes")
        if self.type is None:
            return f"{self.title}: {size}"
        return f"{self.modules:,} {self._name_type()}: {size} ({self.category})"

    @property
    def title(self) -> str:
        """What holds, without its size."""
        if self.type is None:
            return self.category if self.line is None else f"{self.category} at {self.line}"
        return f"{self.modules:,} {self._name_type()} ({self.category})"

    def _name_type(self) -> str:
        return f"{self.type}{'' if self.modules == 1 or str(self.type).endswith('s') else 's'}"


def group_holders(profile: ProfileData) -> list[HolderGroup]:
    """The holders of a profile by module class and category, largest first."""
    types = {module.path: module.type for module in (() if profile.modules is None else profile.modules.walk())}
    found: dict[tuple[str | None, str, str | None], tuple[set[str], int]] = {}
    for holder in profile.holders:
        kind = types.get(holder.module_path) if holder.module_path else None
        key = kind, holder.category, holder.label if kind is None and _LINE.search(holder.label) else None
        paths, nbytes = found.get(key, (set(), 0))
        found[key] = paths | {holder.module_path}, nbytes + holder.bytes
    groups = [HolderGroup(kind, category, len(paths), nbytes, line)
              for (kind, category, line), (paths, nbytes) in found.items()]
    return sorted(groups, key=lambda group: -group.bytes)


def print_groups(groups: Iterable[HolderGroup]) -> str:
    """A line for each of the largest groups, and one for the rest together."""
    ordered = list(groups)
    lines = [str(group) for group in ordered[:_SHOWN]]
    rest = ordered[_SHOWN:]
    if rest:
        lines.append(f"{len(rest)} more: {format_quantity(sum(group.bytes for group in rest), 'bytes')}")
    return "\n".join(lines)


_TEXT = (Column("kind", "Kind", "text"), Column("group", "Group", "text"), Column("phase", "Phase", "text"))
_FIGURES = (Column("calls", "Calls", "count"), Column("bytes", "Bytes", "bytes"),
            Column("wire_bytes", "On the wire", "bytes"), Column("seconds", "Time", "seconds"),
            Column("exposed_seconds", "Exposed", "seconds"))


@register_report.shipped("communication")
def communication_table(profile: ProfileData, by_phase: bool = True, fmt: str = "text") -> str:
    """One row for each kind of communication in each group (and phase): how many calls a step makes, their whole bytes,
    what this rank sends of them, how long they take, and how long nothing is computed meanwhile; the last row is all
    together. ``fmt`` is a format of `tabulate`. A line says so where nothing is communicated or nothing is known.
    """
    check_layout(None, 1, fmt, "communication")
    if profile.comm is None:
        return "what ranks communicate is unknown"
    if not profile.comm:
        return "no communication"
    return print_totals(sum_communication(profile.comm, by_phase=by_phase), fmt)


def sum_exposed(profile: ProfileData) -> float | None:
    """Seconds of a step in which a rank communicates and computes nothing; None without any, or if unknown."""
    seconds = [phase.exposed_comm_seconds for phase in profile.step_phases.values()]
    return add_quantities(seconds) if profile.comm else None


def describe_world(world: WorldInfo) -> str:
    """Which rank of how many, and how they are arranged, in a line.

    >>> describe_world(WorldInfo(16, 3, 8, "dgx_h100", {"dp": 2, "tp": 8}))
    'rank 3 of 16, mesh dp=2 tp=8, 8 to a host, cluster dgx_h100'
    """
    facts = [f"rank {world.rank} of {world.size}",
             world.mesh and "mesh " + " ".join([f"{name}={size}" for name, size in world.mesh.items()]),
             world.devices_per_host and f"{world.devices_per_host} to a host",
             world.cluster and f"cluster {world.cluster}"]
    return ", ".join([str(fact) for fact in facts if fact])


def print_totals(totals: Sequence[CommTotal], fmt: str = "text") -> str:
    """The totals as a table, with a row of their sums; times that are unknown throughout have no column."""
    text = [c for c in _TEXT if c.field != "phase" or any(t.phase for t in totals)]
    figures = [c for c in _FIGURES if c.unit != "seconds" or any(getattr(t, c.field) is not None for t in totals)]
    ranks = Column("ranks", "Ranks", "count")
    cells = [[*(c.format(getattr(t, c.field)) for c in (*text[:2], ranks, *text[2:], *figures))] for t in totals]
    last = ["total", *[""] * len(text), *(c.format_total(getattr(t, c.field) for t in totals) for c in figures)]
    headers = [c.header for c in (*text[:2], ranks, *text[2:], *figures)]
    left = [i for i, header in enumerate(headers) if header in ("Kind", "Group", "Phase")]
    return print_rows(headers, cells, left=left, fmt=fmt, total=last)
