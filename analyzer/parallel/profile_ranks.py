"""Each kind of rank of a job profiled in a world of its own, and what they are together."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from analyzer.api.profile import profile
from analyzer.distributed.world import world
from analyzer.distributed.world_state import StageNotToldError, active_world_state, mail_kept
from analyzer.hardware.cluster_spec import ClusterSpec
from analyzer.profilers.collective import POINT_TO_POINT
from analyzer.results.profile import Profile
from analyzer.results.world import GroupInfo

from .pipeline_schedule import read_schedule
from .pipeline_timeline import PipelineTimeline
from .profiled_stage import join_profiles, list_group, list_stages
from .rank_row import describe_rank, merge_alike
from .rank_table import RankTable


class _Run(NamedTuple):
    """A rank that was run, the schedule that it made, and the ranks that it exchanges messages with, itself included;
    none where it does with none.
    """

    profile: Profile
    schedule: Any
    peers: tuple[int, ...]


class _StageWaitsError(Exception):
    """A rank waits for shapes that ``peers`` are to tell."""

    def __init__(self, reason: StageNotToldError, peers: tuple[int, ...]) -> None:
        super().__init__(str(reason))
        self.reason, self.peers = reason, peers


def profile_ranks(build: Callable[[], Any], args: Any = (), kwargs: Any = None, *, size: int,
                  ranks: Iterable[int] | None = None, devices_per_host: int | None = None,
                  cluster: str | ClusterSpec | None = None, contents: Any = None, **options: Any) -> RankTable:
    """What each kind of rank of a job of ``size`` ranks costs, and how their stages come together.

    Each rank that is run is so in a `world` of its own: ``build()`` is called there and wraps as the rank would;
    ``args`` and ``kwargs`` are those of `profile`, or functions of no arguments that make them there; ``options`` are
    `profile`'s. Without ``ranks``, rank 0 is run, and those that it exchanges messages with, which are other stages of
    a pipeline: ranks that only take part in the same collectives hold equal parts (of what cannot be divided evenly,
    rank 0 holds the largest). A schedule of torch.distributed.pipelining joins the stages into a timeline. Raises what
    `world` and `profile` raise.

    >>> import torch
    >>> def build():
    ...     return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
    >>> table = profile_ranks(build, lambda: (torch.rand(4, 1024, device="cuda"),), size=8, optimizer="sgd")
    >>> [(row.kind, row.ranks, row.params) for row in table.rows]
    [('each', (0, 1, 2, 3, 4, 5, 6, 7), 1048576)]
    """
    def run(rank: int) -> _Run:
        with world(size, rank, devices_per_host, cluster, contents):
            here = {"args": args() if callable(args) else args, "kwargs": kwargs() if callable(kwargs) else kwargs}
            try:
                found = profile(build, **here, **options)
            except StageNotToldError as error:
                raise _StageWaitsError(error, list_group(active_world_state().schedules[-1])) from None
            schedules = active_world_state().schedules
            schedule = schedules[-1] if schedules else None
            return _Run(found, schedule, _find_peers(found) if schedule is None else list_group(schedule))

    with mail_kept() as mail:
        if ranks is not None:
            runs = _run_all(list(dict.fromkeys(ranks)), run, mail)
            return _tabulate(size, runs, {rank: (rank, ) for rank in runs})
        runs = _run_all([0], run, mail, finds_peers=True)
    peers = runs[0].peers
    return _tabulate(size, runs, _share_out(size, peers) if len(peers) > 1 else {0: tuple(range(size))})


def _run_all(ranks: list[int], run: Callable[[int], _Run], mail: Mapping[int, Any],
             finds_peers: bool = False) -> dict[int, _Run]:
    """Run ranks in order, and the peers of the first where asked for. A stage that waits for shapes of a stage that has
    not run is run again after the others, as long as more of them are told: ``mail`` is what was.
    """
    runs: dict[int, _Run] = {}
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
    """The ranks of the group in which a rank without a schedule exchanges messages; nothing where there is none."""
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


def _tabulate(size: int, runs: Mapping[int, _Run], alike: Mapping[int, tuple[int, ...]]) -> RankTable:
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


def _join(runs: Mapping[int, _Run]) -> tuple[PipelineTimeline | None, tuple[str, ...]]:
    """The timeline of a pipeline of which every rank was run; None, and why, where one is missing or has no times."""
    schedules = [one.schedule for one in runs.values()]
    if None in schedules:
        return None, ()
    stages = list_stages(schedules[0])
    if not stages or len(runs) != stages[0].group_size:
        return None, ("not every stage of the pipeline was run: the step of the job is not known", )
    return join_profiles([one.profile for one in runs.values()], read_schedule(schedules[0], len(runs)))
