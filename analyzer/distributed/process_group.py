"""Process groups of any backend: each is made by the one that moves no data, and says that it is what was asked for."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.cuda.nccl
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from analyzer.errors import InputError
from analyzer.meta import collective as collective_hook
from analyzer.meta.intercept.replacement import Undo, replace

from . import collective
from .c10d_state import count_group, make_default_group
from .world_spec import WorldSpec
from .world_state import current_world

#: of the library that PyTorch is built with: .ci/docker/ci_commit_pins/nccl.txt (commit 0baa077)
NCCL_VERSION = (2, 29, 3)

_asked: dict[str, str] = {}  # the backend that was asked for, by the name of the group
_is_adopted = [False]        # whether the program has called init_process_group itself


@contextmanager
def adopting(spec: WorldSpec) -> Iterator[None]:
    """A block in which the program may initialise torch.distributed once, though it is there already."""
    _asked.clear()
    _is_adopted[0] = False
    try:
        yield
    finally:
        _asked.clear()


@contextmanager
def attempting() -> Iterator[None]:
    """A block after which, where it ends with an exception, the program may initialise torch.distributed as before."""
    before = _is_adopted[0]
    try:
        yield
    except BaseException:
        _is_adopted[0] = before
        raise


def _init(original: Any) -> Any:
    def init_process_group(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
                           rank: int = -1, store: Any = None, *args: Any, **kwargs: Any) -> None:
        spec = current_world()
        if spec is None or backend == dist.Backend.FAKE and store is not None and not dist.is_initialized():
            original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        for name, given, known in (("world_size", world_size, spec.size), ("rank", rank, spec.rank)):
            if given not in (-1, known):
                raise InputError(f"init_process_group({name}={given}) in a world of {spec.size} ranks, of which rank "
                                 f"{spec.rank} runs")
        if dist.is_initialized():
            if _is_adopted[0]:  # as torch
                raise ValueError("trying to initialize the default process group twice!")
        else:  # the program destroyed it
            make_default_group(spec.size, spec.rank)
        _is_adopted[0] = True
        _note(c10d._get_default_group(), backend)
    return init_process_group


def _new_group(original: Any) -> Any:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        spec = current_world()
        if spec is None:
            return original(ranks, timeout, backend, *args, **kwargs)
        if ranks is not None and spec.rank not in ranks and not kwargs.get("use_local_synchronization"):
            count_group(ranks)
            return dist.GroupMember.NON_GROUP_MEMBER
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        group = original(ranks, timeout, None, None, *args[1:], **kwargs)
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            _note(group, backend or _asked.get(str(c10d._get_default_group().group_name)))
        return group
    return new_group


def _note(group: Any, backend: Any) -> None:
    if backend is not None:
        _asked[str(group.group_name)] = str(backend).lower()


def _get_backend(original: Any) -> Any:
    def get_backend(group: Any = None) -> Any:
        if current_world() is None:
            return original(group)
        found = group or c10d._get_default_group()
        return _asked.get(str(found.group_name), "nccl").rpartition("cuda:")[2]
    return get_backend


def _answers(value: Any) -> Any:
    return lambda original: lambda *args, **kwargs: value if current_world() is not None else original(*args, **kwargs)


def _find_collectives() -> collective.Collectives | None:
    found = collective_hook.impl
    return found if isinstance(found, collective.Collectives) else None


def replacements() -> Iterator[Undo]:
    """What makes, and asks about, process groups; each result undoes one replacement."""
    for owner in (dist, c10d):
        yield replace(owner, "init_process_group", _init)
        yield replace(owner, "new_group", _new_group)
        yield replace(owner, "get_backend", _get_backend)
        yield replace(owner, "is_nccl_available", _answers(True))
    yield replace(torch.cuda.nccl, "version", _answers(NCCL_VERSION))
    for name, make in (("new_group", _new_group), ("get_backend", _get_backend),
                       ("init_process_group", _init)):
        if hasattr(device_mesh, name):
            yield replace(device_mesh, name, make)
    yield from collective.replacements(_find_collectives)
