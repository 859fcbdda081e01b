"""`World`: a block in which `torch.distributed` is there for any number of ranks, of which this process is one."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware.cluster_spec import ClusterSpec
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.state import CPU

from .world_state import LiveStorages, WorldSpec, entered, launched

_entered: list[World] = []


def entered_world() -> World:
    """The block that this thread is in, or was told of; there is one."""
    return _entered[-1]


class World:
    """A context in which models of many ranks are built and run without data, on one process; see `world`."""

    def __init__(self, spec: WorldSpec, contents: Any = None, is_initialized: bool = True) -> None:
        self.spec, self.contents = spec, contents
        self.is_initialized = is_initialized  #: else the program does it, as one that was launched
        self.space = AddressSpace()  #: the memory of what is made in the block outside of a profile
        self.live = LiveStorages()
        self._undo: ExitStack | None = None

    def __enter__(self) -> World:
        if self._undo is not None:
            raise InputError(f"{self!r} is entered already; make another for another block")
        from .replacement import simulated_world  # torch.distributed and its wrappers are slow to import

        with ExitStack() as undo:
            undo.enter_context(InterruptsDeferred())
            undo.enter_context(entered(self.spec))
            undo.enter_context(launched(self.spec))
            undo.enter_context(simulated_world(self.spec, self.contents, self.is_initialized))
            self.space.listener = self.live
            undo.enter_context(MetaTensorMode(adopted_device=CPU, space=self.space))
            _entered.append(self)
            undo.callback(_entered.pop)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.__exit__(*exc)

    def __repr__(self) -> str:
        return f"world(size={self.spec.size}, rank={self.spec.rank})"


@contextmanager
def world_of_one() -> Iterator[None]:
    """A block in which this process, which nothing launched, is all of the job, under a mode that was entered."""
    from .replacement import simulated_world

    spec = WorldSpec.of(1)
    with entered(spec), simulated_world(spec, None, is_initialized=False):
        yield


def world(size: int, rank: int = 0, devices_per_host: int | None = None, cluster: str | ClusterSpec | None = None,
          contents: Any = None) -> World:
    """A context in which `torch.distributed` is initialised for ``size`` ranks, of which ``rank`` runs.

    Groups of any backend and meshes of any size cost nothing, and collectives move no data. Models are built and run
    without data in it, wrapped as a script would wrap them. ``devices_per_host`` devices are on a host of ``cluster``
    (a name, or a `ClusterSpec`), by default as many as the cluster's hosts have. The environment is that of
    ``torchrun``. What there was of process groups is there again afterwards. A small integer tensor whose contents are
    known has known contents after a collective too: those that follow if every rank held what this one holds, or if
    rank ``i`` of the group held ``contents(kind, ranks, value)[i]`` (``kind`` is a name such as ``"all_to_all"``,
    ``ranks`` are the group's).

    `profile` inside it reports that rank. Raises InputError for a rank that is not in the world, inside another world,
    and while another thread is in one.

    >>> import torch
    >>> from analyzer import profile
    >>> from analyzer.parallel import world
    >>> def build():
    ...     return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
    >>> with world(8):
    ...     p = profile(build, args=(torch.rand(4, 1024),), optimizer="sgd")
    >>> p.param_bytes, p.phases["backward"].comm_bytes
    (4194304, 4194304)
    """
    return World(WorldSpec.of(size, rank, devices_per_host, cluster), contents)
