"""What a kind of rank costs, by the profile of one of them."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.record.process_group import list_runs
from analyzer.results.profile import Profile
from analyzer.results.world import RankRun
from analyzer.units import add_quantities


@dataclass(frozen=True)
class RankRow:
    """Ranks that are alike, by the profile of one of them. None is unknown.

    - ``rank``: the one that was run. ``runs``: all that are taken to be alike, as runs of equal steps.
    - ``kind``: what tells it from the others, ``"stage 1 of 4"``; ``"each"`` where all ranks are alike.
    - ``peak_phase``: in which phase most is allocated. ``comm_bytes``: whole bytes of all collectives and messages.
    - ``host_peak_bytes``: of tensors on the host, of a script that was run dry.
    - ``step_seconds``: of this rank alone, as if none made it wait; ``step_seconds_range`` is low and high, which hold
      nine of ten measured steps.
    """

    rank: int
    runs: tuple[RankRun, ...]
    kind: str
    params: int | None
    param_bytes: int | None
    optimizer_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_phase: str | None
    step_seconds: float | None
    comm_bytes: int | None
    host_peak_bytes: int | None = None
    step_seconds_range: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The rank that was run, and what it is: ``"rank 8 (stage 2 of 4)"``."""
        return self.kind if self.kind == f"rank {self.rank}" else f"rank {self.rank} ({self.kind})"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that are alike, sorted."""
        return tuple(sorted(r for run in self.runs for r in range(run.first, run.last + 1, run.step)))


def merge_alike(rows: Sequence[RankRow]) -> list[RankRow]:
    """One row for all whose figures are equal, by the first of them; ``"each"`` where that is all there are."""
    found: dict[RankRow, list[RankRow]] = {}
    for row in rows:
        found.setdefault(dataclasses.replace(row, rank=0, runs=(), kind=""), []).append(row)
    merged = []
    for same in found.values():
        ranks = [rank for row in same for rank in row.ranks]
        kind = "each" if len(found) == 1 < len(same) else same[0].kind
        merged.append(dataclasses.replace(same[0], runs=tuple(RankRun(*run) for run in list_runs(ranks)), kind=kind))
    return merged


def describe_rank(profile: Profile, rank: int, alike: tuple[int, ...], kind: str) -> RankRow:
    """The row of ranks ``alike``, of which ``rank`` was profiled."""
    fullest = [name for steps in (profile.phases, profile.first_step) for name, info in steps.items()
               if info.peak_allocated_bytes == profile.peak_allocated_bytes is not None]
    comm = [info.comm_bytes for info in profile.step_phases.values()]
    runs = tuple(RankRun(*run) for run in list_runs(alike))
    return RankRow(rank, runs, kind, profile.params, profile.param_bytes, profile.optimizer_bytes,
                   profile.peak_allocated_bytes, profile.peak_reserved_bytes, fullest[0] if fullest else None,
                   profile.step_seconds, add_quantities(comm) if comm else None,
                   profile.host_peak_bytes, profile.step_seconds_range)
