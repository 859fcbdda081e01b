"""Private torch API: process groups that move no data, the stores behind them, and what torch knows process-wide."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.rendezvous as rendezvous
from torch.distributed import device_mesh

from analyzer.cuda.binding import NCCL_VERSION
from analyzer.cuda.stream import simulated_class
from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer, replace, supply

from .deepspeed import follow_engines
from .world_state import active_world_state, current_world

_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")

_stores: list[Any] = []  # of default groups: C++ keeps its half of the object alone


@contextmanager
def process_groups_kept_aside() -> Iterator[None]:
    """A block in which no process group is there yet; afterwards what the block made is forgotten."""
    module: Any = c10d
    tables: dict[str, dict[Any, Any]] = {name: dict(getattr(module, name)) for name in _TABLES}
    default, count, backend, method = (c10d._world.default_pg, module._group_count, module._backend,
                                       module._default_pg_init_method)
    hook = sys.excepthook
    try:
        _forget(module)
        yield
    finally:
        _forget(module)
        for name, table in tables.items():
            getattr(module, name).update(table)
        c10d._world.default_pg = default
        module._group_count, module._backend, module._default_pg_init_method = count, backend, method
        for group, name in tables["_pg_names"].items():
            torch._C._distributed_c10d._register_process_group(name, group)
        sys.excepthook = hook


def _forget(module: Any) -> None:
    _stores.clear()
    torch._C._distributed_c10d._unregister_all_process_groups()
    for name in _TABLES:
        getattr(module, name).clear()
    c10d._world.default_pg = None
    c10d._world.pg_coalesce_state.clear()
    module._group_count, module._backend, module._default_pg_init_method = 0, None, None


def make_default_group(size: int, rank: int) -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    _stores.append(_SimulatedStore())
    dist.init_process_group(dist.Backend.FAKE, store=_stores[-1], world_size=size, rank=rank)


_KINDS = ("TCPStore", "FileStore", "HashStore")


class _ProcessGroupNCCL:
    """What scripts take from the class of NCCL's groups, which builds of torch without CUDA lack: its options."""

    class Options:
        """The attributes of ``ProcessGroupNCCL.Options`` (torch/csrc/distributed/c10d/init.cpp). `new_group` takes them
        and leaves them unread: they change neither what is sent nor how long it takes here.
        """

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            # NCCL_CONFIG_INITIALIZER of nccl.h sets each to NCCL_CONFIG_UNDEF_INT, the least integer
            self.config = SimpleNamespace(**dict.fromkeys(("blocking", "cga_cluster_size", "min_ctas", "max_ctas"),
                                                          -2**31))
            self.group_name, self.global_ranks_in_group = "", list[int]()


class _SimulatedStore(torch._C._distributed_c10d.Store):
    """Answers as a store that all ranks write to. Nothing is waited for: every rank is assumed to have added what this
    one adds, and to have set the keys that this one sets; a key that this rank never set raises InputError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        spec = current_world()
        self._ranks = 1 if spec is None else spec.size
        self.host, self.port = "localhost", 29500

    def set(self, key: str, value: Any) -> None:
        self._values[key] = _encode(value)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            spec = current_world()
            raise InputError(f"rank {0 if spec is None else spec.rank} waits for {key!r} in a store, which another "
                             f"rank sets: no other rank runs; broadcast the value, or set it in every rank")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount * self._ranks
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._values.get(key)
        if found is None and not expected or found == _encode(expected):
            self._values[key] = _encode(desired)
        return self._values.get(key, _encode(expected))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Other ranks are assumed to be there."""

    def check(self, keys: list[str]) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Nothing is waited for."""


def _encode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _simulated(original: Any) -> Any:
    return simulated_class(original, _SimulatedStore, lambda *args, **kwargs: current_world() is not None)


# Process groups of any backend: each is made by the one that moves no data, and says that it is what was asked for.

@contextmanager
def attempting() -> Iterator[None]:
    """A block after which, where it ends with an exception, the program may initialise torch.distributed as before."""
    state = active_world_state()
    before = state.is_adopted
    try:
        yield
    except BaseException:
        state.is_adopted = before
        raise


def _init_process_group(original: Any, backend: Any = None, init_method: Any = None, timeout: Any = None,
                        world_size: int = -1, rank: int = -1, store: Any = None, *args: Any, **kwargs: Any) -> None:
    if backend == dist.Backend.FAKE and store is not None and not dist.is_initialized():
        original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
        return
    state = active_world_state()
    spec = state.spec
    for name, given, known in (("world_size", world_size, spec.size), ("rank", rank, spec.rank)):
        if given not in (-1, known):
            raise InputError(f"init_process_group({name}={given}) in a world of {spec.size} ranks, of which rank "
                             f"{spec.rank} runs")
    if dist.is_initialized():
        if state.is_adopted:  # as torch
            raise ValueError("trying to initialize the default process group twice!")
    else:  # the program destroyed it
        make_default_group(spec.size, spec.rank)
    state.is_adopted = True
    _note(c10d._get_default_group(), backend)


def _new_group(original: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any,
               **kwargs: Any) -> Any:
    follow_engines()
    state = active_world_state()
    if ranks is not None and state.spec.rank not in ranks and not kwargs.get("use_local_synchronization"):
        c10d._process_group_name(ranks, use_hashed_name=False)  # as torch does in ranks that are no members
        return dist.GroupMember.NON_GROUP_MEMBER
    kwargs.pop("pg_options", None)
    kwargs.pop("device_id", None)
    group = original(ranks, timeout, None, None, *args[1:], **kwargs)
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        _note(group, backend or state.backends.get(str(c10d._get_default_group().group_name)))
    return group


def _note(group: Any, backend: Any) -> None:
    if backend is not None:
        active_world_state().backends[str(group.group_name)] = str(backend).lower()


def _get_backend(group: Any = None) -> Any:
    """What was asked for; of a backend for each kind of device, the one for CUDA."""
    found = group or c10d._get_default_group()
    return active_world_state().backends.get(str(found.group_name), "nccl").rpartition("cuda:")[2].partition(",")[0]


def replacements() -> Iterator[Undo]:
    """What makes, and asks about, process groups and stores; each result undoes one replacement."""
    for owner in (dist, c10d, rendezvous):
        for name in _KINDS:
            if hasattr(owner, name):
                yield replace(owner, name, _simulated)
    for owner in (dist, c10d, device_mesh):
        for name, simulated, passes_original in (("init_process_group", _init_process_group, True),
                                                 ("new_group", _new_group, True), ("get_backend", _get_backend, False)):
            if hasattr(owner, name):
                yield answer(owner, name, simulated, passes_original=passes_original, where=current_world)
    for owner in (dist, c10d):
        yield answer(owner, "is_nccl_available", lambda: True, where=current_world)
        yield supply(owner, "ProcessGroupNCCL", _ProcessGroupNCCL)
    # torchtitan calls it after its first step; nothing is waited for
    yield answer(c10d, "_set_pg_timeout", lambda timeout, group=None: None, where=current_world)
    yield answer(torch.cuda.nccl, "version", lambda: NCCL_VERSION, where=current_world)
