"""The world of ranks of which one runs: its size and machine, its state in this process, and the group of a call."""
from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from analyzer.errors import InputError, is_count
from analyzer.meta.address_space import MetaStorage

if TYPE_CHECKING:
    from analyzer.hardware.cluster_spec import ClusterSpec  # profiles outside of a world need none

#: categories of what wrappers hold: parameters that were gathered, what is left of them, what collectives use
UNSHARDED, RESHARDED, BUFFER = "unsharded parameter", "resharded parameter", "communication buffer"


class LiveStorages:
    """Hears of births and deaths of storages, and knows which are there."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[MetaStorage]] = {}

    def born(self, storage: MetaStorage) -> None:
        self._alive[storage.number] = weakref.ref(storage)

    def resized(self, before: int, storage: MetaStorage) -> None:
        """It was told of a death and a birth already."""

    def died(self, number: int) -> None:
        self._alive.pop(number, None)

    def __iter__(self) -> Iterator[MetaStorage]:
        return iter([storage for ref in list(self._alive.values()) if (storage := ref()) is not None])


@dataclass(frozen=True)
class WorldSpec:
    """``size`` ranks, of which ``rank`` runs, ``devices_per_host`` on each host of ``cluster`` (None: the usual one of
    the device that is profiled). Raises InputError for values that cannot be, UnknownDeviceError for an unknown
    cluster's name.

    >>> WorldSpec(64, rank=12).host, WorldSpec(64, rank=12).local_rank, WorldSpec(4).local_size
    (1, 4, 4)
    """

    size: int
    rank: int = 0
    devices_per_host: int = 8
    cluster: ClusterSpec | None = None

    @classmethod
    def of(cls, size: int, rank: int = 0, devices_per_host: int | None = None,
           cluster: str | ClusterSpec | None = None) -> WorldSpec:
        """As the class; ``cluster`` may be a name, and hosts are the cluster's where they are not given."""
        found = None
        if cluster is not None:
            from analyzer.hardware.cluster_spec import find_cluster

            found = find_cluster(cluster)
        if devices_per_host is None:
            devices_per_host = 8 if found is None else found.devices_per_host
        return cls(size, rank, devices_per_host, found)

    def __post_init__(self) -> None:
        if not is_count(self.size, 1):
            raise InputError(f"world(size={self.size!r}): must be a whole number of ranks, 1 or more")
        if not is_count(self.rank, 0) or self.rank >= self.size:
            raise InputError(f"world(size={self.size}, rank={self.rank!r}): the ranks are 0 to {self.size - 1}")
        if not is_count(self.devices_per_host, 1):
            raise InputError(f"world(devices_per_host={self.devices_per_host!r}): must be a whole number, 1 or more")

    @property
    def host(self) -> int:
        return self.rank // self.devices_per_host

    @property
    def hosts(self) -> int:
        return -(-self.size // self.devices_per_host)

    @property
    def local_rank(self) -> int:
        return self.rank % self.devices_per_host

    @property
    def local_size(self) -> int:
        return min(self.devices_per_host, self.size - self.host * self.devices_per_host)

    def environment(self) -> dict[str, str]:
        """As torchrun: ``_start_workers`` in torch/distributed/elastic/agent/server/local_elastic_agent.py."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.local_size), "GROUP_RANK": str(self.host),
                "GROUP_WORLD_SIZE": str(self.hosts), "ROLE_RANK": str(self.rank), "ROLE_WORLD_SIZE": str(self.size),
                "ROLE_NAME": "default", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


# Which world there is in this process: `torch.distributed` knows one, and so does this package.


class StageNotToldError(InputError):
    """A pipeline stage needs the shapes that a stage before it passes on, and no rank with that stage has run."""


@dataclass
class WorldState:
    """What is known of a world, beside what torch's own tables say."""

    spec: WorldSpec
    mail: dict[int, Any]  #: what pipeline stages were told by those before them, by stage
    threads: list[int]  #: the one that entered it, and those that joined
    schedules: list[Any] = field(default_factory=list)  #: of torch.distributed.pipelining, as the rank made them
    worked_for: list[Any] = field(default_factory=list)  #: modules that a wrapper works for now, the innermost last
    #: names of dimensions of meshes, by torch's name of the group that each has
    dimensions: dict[str, str] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)  #: as they were asked for, by the group's name
    is_adopted: bool = False  #: whether the program has called init_process_group itself


_lock = threading.Lock()
_there: WorldState | None = None
_kept_mails: list[dict[int, Any]] = []


def current_world_state() -> WorldState | None:
    state = _there
    return state if state is not None and threading.get_ident() in state.threads else None


def active_world_state() -> WorldState:
    state = current_world_state()
    assert state is not None
    return state


def current_world() -> WorldSpec | None:
    state = current_world_state()
    return None if state is None else state.spec


def is_world_elsewhere() -> bool:
    return _there is not None and current_world_state() is None


@contextmanager
def joined(spec: WorldSpec | None) -> Iterator[None]:
    """A block in which this thread is in the world ``spec`` that another one entered; in none for None."""
    state = _there
    if spec is None or state is None or spec is not state.spec:
        yield
        return
    state.threads.append(threading.get_ident())
    try:
        yield
    finally:
        state.threads.remove(threading.get_ident())


@contextmanager
def working_for(module: Any) -> Iterator[None]:
    """A block in which a wrapper works for ``module``, in whichever other module's hook it does."""
    worked_for = active_world_state().worked_for
    worked_for.append(module)
    try:
        yield
    finally:
        worked_for.pop()


def module_worked_for() -> Any:
    """The module that a wrapper works for now; None where it is the one that runs."""
    state = current_world_state()
    return state.worked_for[-1] if state is not None and state.worked_for else None


@contextmanager
def mail_kept() -> Iterator[dict[int, Any]]:
    """A block in which ranks that run one after the other find what earlier ones sent them: what stages were told."""
    mail: dict[int, Any] = {}
    _kept_mails.append(mail)
    try:
        yield mail
    finally:
        _kept_mails.pop()


@contextmanager
def entered(spec: WorldSpec) -> Iterator[None]:
    """A block in which ``spec`` is the world. Raises InputError in another, and while another thread is in one."""
    global _there
    thread = threading.get_ident()
    with _lock:
        if _there is not None:
            where = "" if _there.threads[0] == thread else " of another thread"
            raise InputError(f"world(size={spec.size}, rank={spec.rank}) inside a world of {_there.spec.size} ranks"
                             f"{where}: torch.distributed knows one world per process; leave that one first")
        _there = WorldState(spec, _kept_mails[-1] if _kept_mails else {}, [thread])
    try:
        yield
    finally:
        _there = None


@contextmanager
def launched(spec: WorldSpec) -> Iterator[None]:
    """A block in which the environment is that of a process that ``torchrun`` started."""
    told = spec.environment()
    before = {name: os.environ.get(name) for name in told}
    try:
        os.environ.update(told)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def find_process_group(given: dict[str, Any]) -> Any:
    """The group among the arguments of an operator, or None. Raises RuntimeError, as torch does, for no such name."""
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group  # names have a type of their own since 2.11
        return resolve(name)
    for value in given.values():
        if isinstance(value, dist.ProcessGroup):  # `Any group_name` of the functional collectives takes both
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None
