"""How a profile was made: the command, the device, the job that its process was one rank of; and what each of several
devices of a process holds and does.
"""
from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import distributed as dist
from torch import nn

from analyzer.hardware import DeviceSpec, find_device
from analyzer.profilers.held_memory import held_bytes, peak_by_category
from analyzer.record.device_log import find_copied
from analyzer.record.log import Log
from analyzer.record.process_group import (
    ProcessGroupSpec,
    format_ranks,
    is_initialized,
    list_mesh_dimensions,
    list_runs,
)

from .view import DeferredFields

Option = str | int | bool | tuple[str, ...]
"""The value of an option: True for one that takes none, a tuple for one that may be repeated."""


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """``analyzer profile TARGET`` with ``options`` by their names (``loss_chunks`` is ``--loss-chunks``)."""

    target: str
    options: dict[str, Option] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one would type it.

        >>> print(CommandInfo("gpt2", {"input": ("int64:2x64",), "device": "h100", "checkpointing": True}))
        analyzer profile gpt2 --input int64:2x64 --device h100 --checkpointing
        """
        words = ["analyzer", "profile", self.target]
        for name, value in self.options.items():
            for text in value if isinstance(value, tuple) else (value,):
                words += [f"--{name.replace('_', '-')}", *([] if text is True else [str(text)])]
        return shlex.join(words)


class DeviceRecord(DeferredFields):
    """A record with the name of a device, which keeps the spec of one that does not come with the package. Copies and
    pickles have it too; what is saved as JSON has the name alone.
    """

    __slots__ = ("_device_spec",)
    device: str | None

    @property
    def own_device(self) -> DeviceSpec | None:
        """The spec that is kept; None for a device that comes with the package and for a record that was read."""
        return getattr(self, "_device_spec", None)

    def keep_device(self, spec: DeviceSpec | None) -> None:
        """Keep a spec, for which ``device`` stands."""
        object.__setattr__(self, "_device_spec", spec)

    def find_device(self, device: str | DeviceSpec) -> DeviceSpec:
        """The spec of ``device``, which may be this record's own by name. Raises UnknownDeviceError."""
        own = self.own_device
        return own if own is not None and device == self.device else find_device(device)

    def __reduce__(self) -> Any:  # a dataclass with slots writes the states of its fields alone
        return _restore, (type(self), self.__getstate__(), self.own_device)


def _restore(cls: type[DeviceRecord], state: list[Any], own: DeviceSpec | None) -> DeviceRecord:
    record = cls.__new__(cls)
    record.__setstate__(state)
    record.keep_device(own)
    return record


def find_parallel_sizes(root: nn.Module) -> dict[str, int | None]:
    """``world_size``, ``data_parallel_size`` and ``model_parallel_size``, as fields of a profile.

    Without a process group all are 1. With one, the group of a wrapper that copies or shards the whole model
    (`DistributedDataParallel`, `FullyShardedDataParallel`, ``fully_shard``) is the data-parallel one, and what is left
    of the world holds one copy of the model together; without such a wrapper nothing tells how the processes share the
    work, so the two are unknown.
    """
    if not is_initialized():
        return {"world_size": 1, "data_parallel_size": 1, "model_parallel_size": 1}
    from analyzer.distributed.fsdp import count_data_parallel  # FSDP is slow to import

    world = dist.get_world_size()
    copies = next((size for module in root.modules() if (size := count_data_parallel(module)) is not None),
                  1 if world == 1 else None)
    return {"world_size": world, "data_parallel_size": copies,
            "model_parallel_size": None if copies is None else world // copies}


class RankRun(NamedTuple):
    """Ranks at equal distances: the first, the last, and the step from one to the next."""

    first: int
    last: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group of this rank, named for its mesh dimension, ``"world"``, its description, or its ranks."""

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
    """The job of a profile: how many ranks, which of them this is, and how they are arranged."""

    size: int
    rank: int
    devices_per_host: int | None = None   #: None where nothing says it
    cluster: str | None = None
    #: size of each dimension by its name, those of flattened and sliced meshes too
    mesh: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()    #: the world first


def describe_world(log: Log, tensors: Iterable[Any]) -> tuple[WorldInfo | None, dict[ProcessGroupSpec, str]]:
    """The job that a log was recorded in, and the names in it of the log's groups. ``tensors`` are parameters: those
    that are distributed know the dimensions of their mesh, also of one on all ranks, which has no group.
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
        return None, names
    mesh = {name: size for name, size, _ in dimensions}
    mesh |= {name: spec.size for name, spec in groups.items() if spec.mesh_dimension is not None
             or of_group.get(spec.name) == name}
    cluster = None if log.world.cluster is None else log.world.cluster.name
    infos = [GroupInfo(name, spec.size, None if spec.ranks is None else tuple(
        [RankRun(*run) for run in list_runs(spec.ranks)])) for name, spec in groups.items()]
    return WorldInfo(log.world.size, log.world.rank, log.world.devices_per_host, cluster, mesh, tuple(infos)), names


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One of several devices of the process that is profiled; its peaks are the maximum over all steps."""

    name: str                                #: "cuda:1"
    allocated_bytes: int | None = None       #: at the end of the last step
    reserved_bytes: int | None = None        #: at the end of the last step
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_phase: str | None = None            #: in which the most is allocated
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    optimizer_bytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)  #: adds up to peak_allocated_bytes
    kernel_seconds: float | None = None      #: of a step: the sum of its kernels' own times


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """What a step copies from one device to another in a phase; one of the two may be the host, "cpu"."""

    source: str
    target: str
    phase: str
    copies: int
    bytes: int
    seconds: float | None = None             #: of all of them, one after the other

    @property
    def is_between_devices(self) -> bool:
        """Whether neither is the host."""
        return "cpu" not in (self.source, self.target)


def list_devices(log: Log, seconds: Mapping[str, float]) -> Iterator[DeviceInfo]:
    """The devices of a log, where there are several, with the ``seconds`` of their kernels by name."""
    for name in log.devices if log.others else ():
        with log.watching(name):
            last = next((record for record in reversed(log.phases) if record.step == log.steps - 1), None)
            top = max(log.phases, key=lambda record: record.peak_allocated_bytes, default=None)
            yield DeviceInfo(
                name=name, allocated_bytes=None if last is None else last.allocated_bytes,
                reserved_bytes=None if last is None else last.reserved_bytes, peak_allocated_bytes=log.peak_bytes,
                peak_reserved_bytes=max([record.peak_reserved_bytes or 0 for record in log.phases], default=0),
                peak_phase=None if top is None or not log.peak_bytes else top.phase,
                param_bytes=held_bytes(log, "parameter", name), buffer_bytes=held_bytes(log, "buffer", name),
                optimizer_bytes=held_bytes(log, "optimizer state", name), peak_by_category=peak_by_category(log),
                kernel_seconds=seconds.get(name))


def list_copies(log: Log, seconds: Mapping[tuple[str, str, str], float]) -> list[CopyInfo]:
    """What the last step of a log of several devices copies, those from one of them to another first, with the
    ``seconds`` by where from, where to and phase.
    """
    found: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for step, call, _, number in log.tallies() if log.others else ():
        ends = find_copied(call.signature) if step == log.steps - 1 else None
        if ends is not None:
            row = found[ends[0], ends[1], call.phase]
            row[0] += number
            row[1] += number * call.signature.outputs[0].nbytes
    return sorted([CopyInfo(*key, copies, nbytes, seconds.get(key)) for key, (copies, nbytes) in found.items()],
                  key=lambda row: (not row.is_between_devices, row.source, row.target, row.phase))
