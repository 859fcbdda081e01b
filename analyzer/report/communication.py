"""What ranks communicate, as text: totals by kind, group and phase."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.results.communication import CommTotal, sum_communication
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.results.world import WorldInfo
from analyzer.units import add_quantities

from .column import Column, check_layout, print_rows

_TEXT = (Column("kind", "Kind", "text"), Column("group", "Group", "text"), Column("phase", "Phase", "text"))
_FIGURES = (Column("calls", "Calls", "count"), Column("bytes", "Bytes", "bytes"),
            Column("wire_bytes", "On the wire", "bytes"), Column("seconds", "Time", "seconds"),
            Column("exposed_seconds", "Exposed", "seconds"))


@register_report.shipped("communication")
def communication_table(profile: Profile, by_phase: bool = True, fmt: str = "text") -> str:
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


def sum_exposed(profile: Profile) -> float | None:
    """Seconds of a step in which a rank communicates and computes nothing; None where it does not communicate, or that
    is not known.
    """
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
