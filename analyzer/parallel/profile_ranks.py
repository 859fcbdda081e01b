"""Each kind of rank of a job profiled in a world of its own, and what they are together: stages that are joined."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.distributed.world import world
from analyzer.distributed.world_state import StageNotToldError, active_world_state, mail_kept
from analyzer.hardware.cluster_spec import ClusterSpec
from analyzer.profilers.collective import POINT_TO_POINT, SUMS
from analyzer.results.run_cost import CommInfo
from analyzer.results.world import GroupInfo
from analyzer.units import add_quantities

from .pipeline_schedule import ActionLists, place_stages, read_schedule
from .pipeline_timeline import PipelineTimeline, join_timeline
from .rank_row import StageCost, describe_rank, find_compute_spreads, merge_alike
from .rank_table import RankTable


class _ProfiledRank(NamedTuple):
    """A rank that was run, the schedule that it made, and the ranks that it exchanges messages with, or none."""

    profile: Profile
    schedule: Any
    peers: tuple[int, ...]


class _StageWaitsError(Exception):
    def __init__(self, reason: StageNotToldError, peers: tuple[int, ...]) -> None:
        super().__init__(str(reason))
        self.reason, self.peers = reason, peers


def profile_ranks(build: Callable[[], Any], args: Any = (), kwargs: Any = None, *, size: int,
                  ranks: Iterable[int] | None = None, devices_per_host: int | None = None,
                  cluster: str | ClusterSpec | None = None, contents: Any = None, **options: Any) -> RankTable:
    """What each kind of rank of a job of ``size`` ranks costs, and how their stages come together. Each rank that is
    run is so in a `world` of its own: ``build()`` is called there and wraps as the rank would; ``args`` and ``kwargs``
    are those of `profile`, or functions of no arguments that make them there; ``options`` are `profile`'s. Without
    ``ranks``, rank 0 is run, and those that it exchanges messages with, which are other stages of a pipeline: ranks
    that only take part in the same collectives hold equal parts (of what cannot be divided evenly, rank 0 holds the
    largest). A schedule of torch.distributed.pipelining joins the stages into a timeline. Raises what `world` and
    `profile` raise.

    >>> import torch
    >>> def build():
    ...     return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
    >>> table = profile_ranks(build, lambda: (torch.rand(4, 1024, device="cuda"),), size=8, optimizer="sgd")
    >>> [(row.kind, row.ranks, row.params) for row in table.rows]
    [('each', (0, 1, 2, 3, 4, 5, 6, 7), 1048576)]
    """
    def run(rank: int) -> _ProfiledRank:
        with world(size, rank, devices_per_host, cluster, contents):
            here = {"args": args() if callable(args) else args, "kwargs": kwargs() if callable(kwargs) else kwargs}
            try:
                found = profile(build, **here, **options)
            except StageNotToldError as error:
                raise _StageWaitsError(error, list_group(active_world_state().schedules[-1])) from None
            schedules = active_world_state().schedules
            schedule = schedules[-1] if schedules else None
            return _ProfiledRank(found, schedule, _find_peers(found) if schedule is None else list_group(schedule))

    with mail_kept() as mail:
        if ranks is not None:
            runs = _run_all(list(dict.fromkeys(ranks)), run, mail)
            return _tabulate(size, runs, {rank: (rank, ) for rank in runs})
        runs = _run_all([0], run, mail, finds_peers=True)
    peers = runs[0].peers
    return _tabulate(size, runs, _share_out(size, peers) if len(peers) > 1 else {0: tuple(range(size))})


def _run_all(ranks: list[int], run: Callable[[int], _ProfiledRank], mail: Mapping[int, Any],
             finds_peers: bool = False) -> dict[int, _ProfiledRank]:
    """Run ranks in order, and the peers of the first where asked for; again those that wait for what others tell."""
    runs: dict[int, _ProfiledRank] = {}
    left = list(ranks)
    while left:
        told, waiting = len(mail), []
        for rank in left:
            try:
                runs[rank] = run(rank)
            except _StageWaitsError as error:
                waiting.append(rank)
                last = error
        if finds_peers:
            finds_peers = False
            peers = runs[0].peers if runs else last.peers
            waiting += [rank for rank in peers if rank != 0]
        elif len(waiting) == len(left) and len(mail) == told:
            raise last.reason
        left = waiting
    return runs


def _find_peers(profile: Profile) -> tuple[int, ...]:
    groups: Mapping[str, GroupInfo] = {g.name: g for g in profile.world.groups} if profile.world is not None else {}
    names = dict.fromkeys(row.group for row in profile.comm or () if row.kind in POINT_TO_POINT and row.group)
    found = [groups[name].ranks for name in names if name in groups]
    return next((ranks for ranks in found if ranks is not None), ())


def _share_out(size: int, peers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The ranks that are alike to each of ``peers``: those with the same place along the peers' dimension, which is as
    far apart for all; each alone where the distances differ.

    >>> _share_out(8, (0, 2, 4, 6)), _share_out(8, (0, 1))
    ({0: (0, 1), 2: (2, 3), 4: (4, 5), 6: (6, 7)}, {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)})
    """
    step = peers[1] - peers[0]
    if list(peers) != list(range(0, step * len(peers), step)) or size % (step * len(peers)):
        return {rank: (rank, ) for rank in peers}
    return {peer: tuple(rank for rank in range(size) if rank // step % len(peers) == place)
            for place, peer in enumerate(peers)}


def _tabulate(size: int, runs: Mapping[int, _ProfiledRank], alike: Mapping[int, tuple[int, ...]]) -> RankTable:
    peers = next(iter(runs.values())).peers if runs else ()
    ordered = {rank: runs[rank] for rank in (peers if set(peers) == set(runs) else sorted(runs))}
    profiles = {rank: one.profile for rank, one in ordered.items()}
    timeline, assumptions = _join(ordered)
    kinds = {}  # what tells a rank from the others: its stages
    for rank, one in ordered.items():
        stages = [] if one.schedule is None else list_stages(one.schedule)
        kinds[rank] = ("each" if len(ordered) == 1 else f"rank {rank}") if not stages else (
            f"stage {'+'.join(str(stage.stage_index + 1) for stage in stages)} of {stages[0].num_stages}")
    rows = [describe_rank(one, rank, alike[rank], kinds[rank]) for rank, one in profiles.items()]
    if timeline is None:
        rows = merge_alike(rows)
    missing = size - len({rank for row in rows for rank in row.ranks})
    if missing:
        assumptions = (*assumptions, f"{missing} of {size} ranks were not run and are in no row")
    return RankTable(size, tuple(rows), timeline, assumptions, profiles)


def _join(runs: Mapping[int, _ProfiledRank]) -> tuple[PipelineTimeline | None, tuple[str, ...]]:
    """The timeline of a pipeline of which every rank was run; None, and why, where one is missing or has no times."""
    schedules = [one.schedule for one in runs.values()]
    if None in schedules:
        return None, ()
    stages = list_stages(schedules[0])
    if not stages or len(runs) != stages[0].group_size:
        return None, ("not every stage of the pipeline was run: the step of the job is not known", )
    return join_profiles([one.profile for one in runs.values()], read_schedule(schedules[0], len(runs)))


# Profiles of a pipeline's ranks turned into costs of its stages, and these joined.

_EVEN = "stages of one rank are assumed to compute for equally long"


def list_stages(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]


def list_group(schedule: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(list_stages(schedule)[0].group))


def join_profiles(profiles: Sequence[Profile], lists: ActionLists) -> tuple[PipelineTimeline | None, tuple[str, ...]]:
    """The timeline of ranks that were profiled alone, in the order of the pipeline's ranks, and what it takes for
    granted; None where seconds are not known. A rank's wall time without what it waited for is divided evenly among
    micro-batches and stages. Sums over groups that the forward pass does not use are the exchange of gradients.
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
    rows = profile.comm or ()
    forward, backward, optimizer = (profile.phases[name].seconds if name in profile.phases else 0.0
                                    for name in ("forward", "backward", "optimizer"))
    waited = {phase: [row.exposed_seconds for row in rows if row.kind in POINT_TO_POINT and row.phase == phase]
              for phase in ("forward", "backward")}
    sums = [row.exposed_seconds for row in find_exchange(rows)]
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
                     transfer_spread=find_spread(profile, [row for row in rows if row.kind in POINT_TO_POINT]),
                     group_spread=find_spread(profile, [row for row in rows if row.kind in SUMS]))


def find_exchange(rows: Sequence[CommInfo]) -> list[CommInfo]:
    """The rows of the exchange of gradients: of sums over groups that the forward pass does not use."""
    used = {row.group for row in rows if row.phase == "forward"}
    return [row for row in rows if row.kind in SUMS and row.phase == "backward" and row.group not in used]


def find_spread(profile: Profile, rows: Sequence[CommInfo]) -> float | None:
    """How far nine in ten measured seconds of the operators of some ``rows`` are from the predicted ones, as a part."""
    names = {row.operator for row in rows}
    found = [operator for operator in profile.operators if operator.operator in names]
    seconds = add_quantities([operator.seconds for operator in found])
    error = add_quantities([operator.error_seconds for operator in found])
    return None if seconds is None or error is None else error / seconds if seconds else 0.0


def _send_seconds(rows: Sequence[CommInfo], ranks: dict[int, int], stage: int, step: int) -> float:
    if ranks.get(stage + step, ranks[stage]) == ranks[stage]:
        return 0.0
    seconds = [row.seconds for row in rows if row.kind in POINT_TO_POINT and row.seconds is not None]
    return statistics.median(seconds) if seconds else 0.0
