"""How many processes run a model together, and how they share it."""
from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch import nn

from analyzer.record.process_group import is_initialized


def find_parallel_sizes(root: nn.Module) -> dict[str, int | None]:
    """``world_size``, ``data_parallel_size`` and ``model_parallel_size``, as fields of a profile.

    Without a process group all are 1. With one, the group of a wrapper that copies or shards the whole model
    (`DistributedDataParallel`, `FullyShardedDataParallel`, ``fully_shard``) is the data-parallel one, and what is left
    of the world holds one copy of the model together; without such a wrapper nothing tells how the processes share the
    work, so the two are unknown.

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


def _group_size(module: Any) -> int | None:
    """How many ranks a wrapper spreads the batch over: of a mesh given to ``fully_shard`` or to FSDP those of all its
    dimensions, that over which it only copies included (HSDP). Private torch API: torch/distributed/fsdp/_init_utils.py
    (``_inter_node_pg``) and _fully_shard/_fsdp_common.py (``DataParallelMeshInfo``).
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    if type(module).__name__ == "FullyShardedDataParallel":
        copies = getattr(module, "_inter_node_pg", None)
        return dist.get_world_size(module.process_group) * (1 if copies is None else dist.get_world_size(copies))
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    group = getattr(state, "_fsdp_param_group", None)
    if group is None:
        return None
    sizes = [getattr(group.mesh_info, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
    return int(sizes[0] * sizes[1])
