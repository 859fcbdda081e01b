"""How many processes run a model together, and how they share it."""
from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn


def find_parallel_sizes(root: nn.Module) -> dict[str, int | None]:
    """``world_size``, ``data_parallel_size`` and ``model_parallel_size``, as fields of a profile.

    Without a process group all are 1. With one, the group of a wrapper that copies or shards the whole model (`DistributedDataParallel`,
    `FullyShardedDataParallel`) is the data-parallel one, and what is left of the world holds one copy of the model together;
    without such a wrapper nobody says how the processes share the work, so the two are unknown.

    >>> find_parallel_sizes(nn.Linear(2, 2))
    {'world_size': 1, 'data_parallel_size': 1, 'model_parallel_size': 1}
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {"world_size": 1, "data_parallel_size": 1, "model_parallel_size": 1}
    world = dist.get_world_size()
    copies = next((size for module in root.modules() if (size := _group_size(module)) is not None), 1 if world == 1 else None)
    return {"world_size": world, "data_parallel_size": copies, "model_parallel_size": None if copies is None else world // copies}


def _group_size(module: nn.Module) -> int | None:
    group = getattr(module, "process_group", None)
    if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel":
        return dist.get_world_size(group)
    states = getattr(module, "_get_fsdp_state", None)  # of fully_shard
    mesh = None if states is None else getattr(getattr(states(), "_mesh_info", None), "mesh", None)
    return None if mesh is None else int(torch.tensor(mesh.shape).prod())
