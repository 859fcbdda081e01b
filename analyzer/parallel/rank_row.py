"""What a rank takes, as a row, and what a stage of a pipeline costs."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.record.process_group import list_runs
from analyzer.results.world import RankRun
from analyzer.units import add_quantities

_PARTS = ("backward_input", "backward_weight")
#: What errors go together: seconds of one family are predicted by one model. Of each, the fields of a `StageCost`.
FAMILIES = {"compute": ("forward", "backward", *_PARTS, "optimizer"), "transfer": ("send_forward", "send_backward"),
            "group": ("reduce_grad", "unshard")}


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage, of a micro-batch; ``reduce_grad``, ``unshard`` and ``optimizer`` are of a step. Raises
    InputError for seconds that are negative or not finite.

    - ``backward_input``, ``backward_weight``: the two parts of a backward pass that zero-bubble schedules run apart;
      None where not known.
    - ``send_forward``, ``send_backward``: from this stage to the next one, and to the one before.
    - ``reduce_grad``: what of the exchange of gradients is left when the last backward pass ends. ``unshard``:
      gathering the stage's parameters.
    - ``compute_spread``, ``transfer_spread``, ``group_spread``: nine in ten measured seconds of computations, transfers
      and collectives are at most that part above the predicted ones, or below by the same factor; None where not known.
      ``compute_spread_below``: the factor less one by which computations are below, where it is another.
    """

    forward: float
    backward: float
    backward_input: float | None = None
    backward_weight: float | None = None
    send_forward: float = 0.0
    send_backward: float = 0.0
    reduce_grad: float = 0.0
    unshard: float = 0.0
    optimizer: float = 0.0
    compute_spread: float | None = None
    transfer_spread: float | None = None
    group_spread: float | None = None
    compute_spread_below: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is None and (name in _PARTS or "_spread" in name):
                continue
            if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0):
                raise InputError(f"StageCost({name}={seconds!r}): must be seconds, 0 or more")

    def seconds_of(self, kind: str) -> float:
        """Seconds of an action of that kind; half of the backward pass for a part of it that is not known."""
        seconds = getattr(self, kind)
        return self.backward / 2 if seconds is None else float(seconds)

    def spread_of(self, family: str, way: int = 1) -> float | None:
        """The spread of one of `FAMILIES`, above (``way`` 1) or below (-1); 0.0 where its seconds are none."""
        spread: float | None = getattr(self, f"{family}_spread")
        if (family, way) == ("compute", -1) and spread is not None and self.compute_spread_below is not None:
            spread = self.compute_spread_below
        return spread if any(getattr(self, name) for name in FAMILIES[family]) else 0.0

    def stretch(self, family: str, way: int = 1) -> StageCost:
        """The cost with the seconds of a family at the upper end of their spread (``way`` 1), or at the lower (-1)."""
        factor = (1 + (self.spread_of(family, way) or 0.0))**way
        known = {name: getattr(self, name) for name in FAMILIES[family] if getattr(self, name) is not None}
        return dataclasses.replace(self, **{name: seconds * factor for name, seconds in known.items()})


def find_compute_spreads(profile: Profile) -> tuple[float | None, float | None]:
    """How far nine in ten measured steps may be above a rank's own, and by what factor less one below it, as a
    `StageCost` has them; None where its range is not known.

    >>> find_compute_spreads(Profile(name="", mode="train", step_seconds=1.0, step_seconds_range=(0.8, 1.5)))
    (0.5, 0.25)
    """
    step, known = profile.step_seconds, profile.step_seconds_range
    return (known[1] / step - 1, step / known[0] - 1) if step and known and known[0] else (None, None)


@dataclass(frozen=True)
class RankRow:
    """Ranks that are alike, by the profile of one of them. None is unknown.

    - ``rank``: the one that was run. ``runs``: all that are assumed to be alike, as runs of equal steps.
    - ``kind``: what tells it from the others, ``"stage 1 of 4"``; ``"each"`` where all ranks are alike.
    - ``peak_phase``: in which phase most is allocated. ``comm_bytes``: whole bytes of all collectives and messages.
    - ``host_peak_bytes``: of tensors on the host, of a script that was run dry.
    - ``step_seconds``: of this rank alone, as if none made it wait; ``step_seconds_range`` holds nine of ten measured
      steps.
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
    fullest = [name for steps in (profile.phases, profile.first_step) for name, info in steps.items()
               if info.peak_allocated_bytes == profile.peak_allocated_bytes is not None]
    comm = [info.comm_bytes for info in profile.step_phases.values()]
    runs = tuple(RankRun(*run) for run in list_runs(alike))
    return RankRow(rank, runs, kind, profile.params, profile.param_bytes, profile.optimizer_bytes,
                   profile.peak_allocated_bytes, profile.peak_reserved_bytes, fullest[0] if fullest else None,
                   profile.step_seconds, add_quantities(comm) if comm else None,
                   profile.host_peak_bytes, profile.step_seconds_range)
