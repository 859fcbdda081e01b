"""Modules that ranks share: those of which each has a part run only together, those of which each has a copy alone."""
from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from analyzer.errors import InputError
from analyzer.record.tensor_walk import walk_modules


def find_replica(walked: Iterable[tuple[str, nn.Module]]) -> str | None:
    """The path of the first `DistributedDataParallel` of (path, module) pairs; None where there is none."""
    return next((path for path, module in walked if isinstance(module, nn.parallel.DistributedDataParallel)), None)


def refuse_sharded(root: nn.Module) -> None:
    """Raise InputError where FSDP, ``fully_shard`` or tensor parallelism shards parameters of ``root``."""
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if fsdp is None and tensor is None:
        return  # nothing is sharded
    walked = walk_modules(root)
    kinds = {type(module) for _, module in walked}.union(*[
        map(type, held.values()) for _, module in walked for held in (module._parameters, module._buffers) if held])
    sharding = (*(() if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)),
                *(() if tensor is None else (tensor.DTensor,)))
    for path, module in walked if any(issubclass(kind, sharding) for kind in kinds) else ():
        found = _find_wrapper(module, fsdp, tensor)
        if found is not None:
            raise InputError(
                f"{path or 'the model'} ({type(module).__name__}) is sharded over ranks by {found}, so it runs with "
                "other ranks alone: build it in the function that `profile` is given, inside `with "
                "analyzer.parallel.world(ranks)`, or profile the module as it is before it is wrapped")


def _find_wrapper(module: nn.Module, fsdp: Any, tensor: Any) -> str | None:
    """What shards the parameters of a module itself."""
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "fully_shard"
    if tensor is not None:
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(held, tensor.DTensor):
                return f"tensor parallelism (parallelize_module: {name} is a DTensor)"
    return None
