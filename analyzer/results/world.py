"""The job that a profiled process is one rank of, and its process groups, as plain data."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from analyzer.record.log import Log
from analyzer.record.process_group import ProcessGroupSpec, format_ranks, list_mesh_dimensions, list_runs


class RankRun(NamedTuple):
    """Ranks at equal distances: the first, the last, and the step from one to the next."""

    first: int
    last: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group that this rank is in. Its name is that of its mesh dimension, ``"world"`` for the default group,
    its description, or its ranks.

    >>> GroupInfo("dp", 4, (RankRun(0, 24, 8),)).ranks
    (0, 8, 16, 24)
    """

    name: str
    size: int
    runs: tuple[RankRun, ...] | None = None  #: its global ranks, as runs; None where torch does not list them

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Its global ranks, sorted."""
        return None if self.runs is None else tuple(
            [rank for run in self.runs for rank in range(run.first, run.last + 1, run.step)])


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """The job of a profile: how many ranks, which of them this is, and how they are arranged.

    >>> WorldInfo(16, 3, mesh={"dp": 2, "tp": 8}).mesh["tp"]
    8
    """

    size: int
    rank: int
    devices_per_host: int | None = None   #: None where nothing says it
    cluster: str | None = None
    #: size of each dimension by its name, those of flattened and sliced meshes too
    mesh: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()    #: the world first


class World(NamedTuple):
    """A `WorldInfo`, and the names in it of the groups of a log."""

    info: WorldInfo | None
    names: dict[ProcessGroupSpec, str]


def describe_world(log: Log, tensors: Iterable[Any]) -> World:
    """The job that a log was recorded in. ``tensors`` are the model's parameters: those that are distributed know the
    dimensions of their mesh, also of one that lies on all ranks, for which torch makes no group.
    """
    dimensions = list(list_mesh_dimensions(tensors)) if log.world is not None else []
    of_group = dict(() if log.world is None else log.world.dimensions)
    of_group |= {group: name for name, _, group in reversed(dimensions)}
    specs = dict.fromkeys([*([] if log.world is None else log.world.groups),
                           *(spec for spec in log.groups.values() if spec is not None)])
    names: dict[ProcessGroupSpec, str] = {}
    groups: dict[str, ProcessGroupSpec] = {}
    for spec in specs:
        name = of_group.get(spec.name, spec.label)
        if (known := groups.get(name)) is not None and (known.size, known.ranks) != (spec.size, spec.ranks):
            name += f" (group {spec.name})" if spec.ranks is None else f" (ranks {format_ranks(spec.ranks)})"
        groups.setdefault(name, spec)
        names[spec] = name
    if log.world is None:
        return World(None, names)
    mesh = {name: size for name, size, _ in dimensions}
    mesh |= {name: spec.size for name, spec in groups.items() if spec.mesh_dimension is not None
             or of_group.get(spec.name) == name}
    cluster = None if log.world.cluster is None else log.world.cluster.name
    return World(WorldInfo(log.world.size, log.world.rank, log.world.devices_per_host, cluster, mesh, tuple(
        [_describe_group(name, spec) for name, spec in groups.items()])), names)


def _describe_group(name: str, spec: ProcessGroupSpec) -> GroupInfo:
    runs = None if spec.ranks is None else tuple([RankRun(*run) for run in list_runs(spec.ranks)])
    return GroupInfo(name, spec.size, runs)
