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
from .world_state import active_world_state, current_world

#: of the library that PyTorch is built with: .ci/docker/ci_commit_pins/nccl.txt (commit 0baa077)
NCCL_VERSION = (2, 29, 3)


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
    state = active_world_state()
    if ranks is not None and state.spec.rank not in ranks and not kwargs.get("use_local_synchronization"):
        count_group(ranks)
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
    """What makes, and asks about, process groups; each result undoes one replacement."""
    for owner in (dist, c10d, device_mesh):
        for name, simulated, passes_original in (("init_process_group", _init_process_group, True),
                                                 ("new_group", _new_group, True), ("get_backend", _get_backend, False)):
            if hasattr(owner, name):
                yield answer(owner, name, simulated, passes_original=passes_original, where=current_world)
    for owner in (dist, c10d):
        yield answer(owner, "is_nccl_available", lambda: True, where=current_world)
    yield answer(torch.cuda.nccl, "version", lambda: NCCL_VERSION, where=current_world)
