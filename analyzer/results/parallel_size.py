"""How many processes run a model together, and how they share it."""
from __future__ import annotations

from torch import distributed as dist
from torch import nn

from analyzer.record.process_group import is_initialized


def find_parallel_sizes(root: nn.Module) -> dict[str, int | None]:
    """``world_size``, ``data_parallel_size`` and ``model_parallel_size``, as fields of a profile.

    Without a process group all are 1. With one, the group of a wrapper that copies or shards the whole model
    (`DistributedDataParallel`, `FullyShardedDataParallel`) is the data-parallel one, and what is left of the world
    holds one copy of the model together; without such a wrapper nothing tells how the processes share the work, so the
    two are unknown.

    >>> find_parallel_sizes(nn.Linear(2, 2))
    {'world_size': 1, 'data_parallel_size': 1, 'model_parallel_size': 1}
    """
    if not is_initialized():
        return {"world_size": 1, "data_parallel_size": 1, "model_parallel_size": 1}
    world = dist.get_world_size()
    copies = next((size for module in root.modules() if (size := _group_size(module)) is not None),
                  1 if world == 1 else None)
    return {"world_size": world, "data_parallel_size": copies,
            "model_parallel_size": None if copies is None else world // copies}


def _group_size(module: nn.Module) -> int | None:
    if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel":
        return dist.get_world_size(getattr(module, "process_group", None))
    if type(module).__name__.startswith("FSDP"):  # the class that fully_shard makes of a module's own
        meshes = [mesh for p in module.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
        if meshes and meshes[0].ndim == 1:  # of more dimensions, only who made the mesh knows which is for what
            return int(meshes[0].size())
    return None
