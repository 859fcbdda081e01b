"""Private torch API: what `torch.distributed` knows process-wide, kept aside for the length of a block."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")

_stores: list[Any] = []  # of default groups: C++ keeps its half of the object alone


@contextmanager
def process_groups_kept_aside() -> Iterator[None]:
    """A block in which no process group is there yet; afterwards those from before are, and what the block made is
    forgotten: groups and their names, the hook that prints exceptions.
    """
    module: Any = c10d
    tables: dict[str, dict[Any, Any]] = {name: dict(getattr(module, name)) for name in _TABLES}
    default, count, backend, method = (c10d._world.default_pg, module._group_count, module._backend,
                                       module._default_pg_init_method)
    hook = sys.excepthook
    names: dict[Any, Any] = dict(module._pg_names)
    try:
        _forget(module)
        yield
    finally:
        _forget(module)
        for name, table in tables.items():
            getattr(module, name).update(table)
        c10d._world.default_pg = default
        module._group_count, module._backend, module._default_pg_init_method = count, backend, method
        for group, name in names.items():
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
    """Make the group of all ranks, which moves no data."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    from .store import SimulatedStore

    _stores.append(SimulatedStore())
    dist.init_process_group(dist.Backend.FAKE, store=_stores[-1], world_size=size, rank=rank)


def count_group(ranks: list[int]) -> None:
    """Use up the name of a group that this rank is no member of, as torch does in every rank."""
    c10d._process_group_name(ranks, use_hashed_name=False)
