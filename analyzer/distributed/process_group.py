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
from analyzer.meta.intercept.replacement import Undo, answer

from .c10d_state import count_group, make_default_group
from .world_spec import WorldSpec
from .world_state import current_world, known_world

#: of the library that PyTorch is built with: .ci/docker/ci_commit_pins/nccl.txt (commit 0baa077)
NCCL_VERSION = (2, 29, 3)

_asked: dict[str, str] = {}  # the backend that was asked for, by the name of the group
_is_adopted = [False]        # whether the program has called init_process_group itself


@contextmanager
def adopting() -> Iterator[None]:
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


def _init_process_group(original: Any, backend: Any = None, init_method: Any = None, timeout: Any = None,
                        world_size: int = -1, rank: int = -1, store: Any = None, *args: Any, **kwargs: Any) -> None:
    if backend == dist.Backend.FAKE and store is not None and not dist.is_initialized():
        original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
        return
    spec = known_world()
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


def _new_group(original: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any,
               **kwargs: Any) -> Any:
    if ranks is not None and known_world().rank not in ranks and not kwargs.get("use_local_synchronization"):
        count_group(ranks)
        return dist.GroupMember.NON_GROUP_MEMBER
    kwargs.pop("pg_options", None)
    kwargs.pop("device_id", None)
    group = original(ranks, timeout, None, None, *args[1:], **kwargs)
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        _note(group, backend or _asked.get(str(c10d._get_default_group().group_name)))
    return group


def _note(group: Any, backend: Any) -> None:
    if backend is not None:
        _asked[str(group.group_name)] = str(backend).lower()


def _get_backend(group: Any = None) -> Any:
    """What was asked for; of a backend for each kind of device, the one for CUDA."""
    found = group or c10d._get_default_group()
    return _asked.get(str(found.group_name), "nccl").rpartition("cuda:")[2].partition(",")[0]


def replacements() -> Iterator[Undo]:
    """What makes, and asks about, process groups; each result undoes one replacement."""
    for owner in (dist, c10d, device_mesh):
        for name, simulated, passes_original in (("init_process_group", _init_process_group, True),
                                                 ("new_group", _new_group, True), ("get_backend", _get_backend, False)):
            if hasattr(owner, name):
                yield answer(owner, name, simulated, passes_original=passes_original, where=current_world)
    for owner in (dist, c10d):
        yield answer(owner, "is_nccl_available", lambda: True, where=current_world)
    yield answer(torch.cuda.nccl, "version", lambda: NCCL_VERSION, where=current_world)
