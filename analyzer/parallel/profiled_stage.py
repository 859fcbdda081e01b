"""Profiles of a pipeline's ranks turned into costs of its stages, and these joined."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from analyzer.profilers.collective import POINT_TO_POINT
from analyzer.results.profile import Profile
from analyzer.results.run_cost import CommInfo
from analyzer.units import add_quantities

from .pipeline_schedule import ActionLists, place_stages
from .pipeline_timeline import PipelineTimeline, join_timeline
from .rank_row import StageCost

_SUMS = ("all_reduce", "reduce_scatter")
_EVEN = "stages of one rank are taken to compute for equally long"


def list_stages(schedule: Any) -> list[Any]:
    """The stages that a rank's schedule of torch.distributed.pipelining runs."""
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]


def list_group(schedule: Any) -> tuple[int, ...]:
    """The global ranks of a schedule's pipeline, in the order of the group."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(list_stages(schedule)[0].group))


def join_profiles(profiles: Sequence[Profile], lists: ActionLists) -> tuple[PipelineTimeline | None, tuple[str, ...]]:
    """The timeline of ranks that were profiled alone, in the order of the pipeline's ranks, and what it takes for
    granted; None where seconds are not known. What a rank computes is the wall time of its forward and backward passes
    without what it waited for messages, an equal part for each micro-batch and stage. Sums over groups that the forward
    pass does not use are the exchange of gradients.
    """
    ranks, micro_batches = place_stages(lists), len({a.micro_batch for a in lists[0] if a.kind == "forward"})
    costs = []
    for stage, rank in sorted(ranks.items()):
        cost = _cost_of(profiles[rank], stage, ranks, micro_batches, list(ranks.values()).count(rank))
        if cost is None:
            return None, ("seconds of a rank are not known: nor is the step of the job", )
        costs.append(cost)
    timeline = join_timeline(lists, costs)
    return timeline, (_EVEN, ) if len(ranks) > len(lists) else ()


def _cost_of(profile: Profile, stage: int, ranks: dict[int, int], micro_batches: int, stages: int) -> StageCost | None:
    """The cost of one of the ``stages`` of a rank; ``ranks`` are those of all stages, in the pipeline's group."""
    rows = profile.comm or ()
    forward, backward, optimizer = (profile.phases[name].seconds if name in profile.phases else 0.0
                                    for name in ("forward", "backward", "optimizer"))
    waited = {phase: [row.exposed_seconds for row in rows if row.kind in POINT_TO_POINT and row.phase == phase]
              for phase in ("forward", "backward")}
    used = {row.group for row in rows if row.phase == "forward"}
    sums = [row.exposed_seconds for row in rows
            if row.kind in _SUMS and row.phase == "backward" and row.group not in used]
    known = [*waited["forward"], *waited["backward"], *sums, forward, backward, optimizer,
             *(row.seconds for row in rows if row.kind in POINT_TO_POINT)]
    if any(seconds is None for seconds in known):
        return None
    exchange = sum(s for s in sums if s is not None)
    parts = micro_batches * stages
    computes = [((seconds or 0.0) - sum(s for s in waited[phase] if s is not None) - more) / parts
                for phase, seconds, more in (("forward", forward, 0.0), ("backward", backward, exchange))]
    above, below = find_compute_spreads(profile)
    return StageCost(max(0.0, computes[0]), max(0.0, computes[1]), send_forward=_send_seconds(rows, ranks, stage, 1),
                     send_backward=_send_seconds(rows, ranks, stage, -1), reduce_grad=exchange / stages,
                     optimizer=(optimizer or 0.0) / stages, compute_spread=above, compute_spread_below=below,
                     transfer_spread=_find_spread(profile, [row for row in rows if row.kind in POINT_TO_POINT]),
                     group_spread=_find_spread(profile, [row for row in rows if row.kind in _SUMS]))


def find_compute_spreads(profile: Profile) -> tuple[float | None, float | None]:
    """How far nine in ten measured steps may be above a rank's own, and by what factor less one below it, as a
    `StageCost` has them; None where its range is not known.

    >>> find_compute_spreads(Profile(name="", mode="train", step_seconds=1.0, step_seconds_range=(0.8, 1.5)))
    (0.5, 0.25)
    """
    step, known = profile.step_seconds, profile.step_seconds_range
    return (known[1] / step - 1, step / known[0] - 1) if step and known and known[0] else (None, None)


def _find_spread(profile: Profile, rows: Sequence[CommInfo]) -> float | None:
    """The spread of what communicates, all of whose errors go together; None where a time is not known."""
    names = {row.operator for row in rows}
    found = [operator for operator in profile.operators if operator.operator in names]
    seconds = add_quantities([operator.seconds for operator in found])
    error = add_quantities([operator.error_seconds for operator in found])
    return None if seconds is None or error is None else error / seconds if seconds else 0.0


def _send_seconds(rows: Sequence[CommInfo], ranks: dict[int, int], stage: int, step: int) -> float:
    """Seconds of a message to the stage after or before: of the rank's usual message."""
    if ranks.get(stage + step, ranks[stage]) == ranks[stage]:
        return 0.0
    seconds = [row.seconds for row in rows if row.kind in POINT_TO_POINT and row.seconds is not None]
    return statistics.median(seconds) if seconds else 0.0
