"""What a given module is wrapped in: compiled, exported, replicated or sharded; the devices that it is on; and why it
cannot be called with what it is given.
"""
from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer.distributed.world_state import current_world
from analyzer.errors import InputError
from analyzer.meta.structure import tensors_of
from analyzer.meta.tensor import device_of


def uncompiled(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile(module)``."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None:
        while isinstance(module, eval_frame.OptimizedModule):
            module = module._orig_mod
    return module


def find_place(module: nn.Module, arguments: Any) -> torch.device:
    """The first accelerator that an argument or a tensor of the module is assumed to be on, else the host."""
    for tensor in (*tensors_of(arguments), *module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and (place := device_of(tensor)).type not in ("cpu", "meta"):
            return place
    return torch.device("cpu")


def exported_module(model: Any) -> Any:
    """The module of a program by ``torch.export``, whose flags change nothing; anything else as it is."""
    export = sys.modules.get("torch.export.exported_program")
    if export is None or not isinstance(model, export.ExportedProgram):
        return model
    return ignore_flags(model.module())


def ignore_flags(module: Any) -> Any:
    """``module``, whose `train` and `eval` change nothing where torch's refuse to be called, as of an exported one."""
    if isinstance(module, torch.fx.GraphModule) and "train" in vars(module):
        module.train = lambda mode=True: module  # type: ignore[method-assign]
        module.eval = lambda: module  # type: ignore[method-assign]
    return module


def count_devices(module: nn.Module, values: Any) -> int:
    """How many devices a process has at least: as many as the indices of those say that tensors of ``module`` and of
    ``values`` are on, and that a graph names. A rank of a job has one.
    """
    if current_world() is not None:
        return 1
    found = [device_of(t) for t in (*module.parameters(), *module.buffers(), *tensors_of(values)) if not is_lazy(t)]
    if isinstance(module, torch.fx.GraphModule):
        for node in module.graph.nodes:
            torch.fx.node.map_aggregate((node.args, node.kwargs), lambda value: _note_device(value, found))
    return 1 + max([device.index or 0 for device in found if device.type != "meta"], default=0)


def _note_device(value: Any, found: list[torch.device]) -> Any:
    if isinstance(value, torch.device):
        found.append(value)
    elif isinstance(value, str) and value.startswith("cuda:"):
        found.append(torch.device(value))
    return value


def find_replica(walked: Iterable[tuple[str, nn.Module]]) -> str | None:
    """The path of the first `DistributedDataParallel` of (path, module) pairs; None where there is none."""
    return next((path for path, module in walked if isinstance(module, nn.parallel.DistributedDataParallel)), None)


def refuse_sharded(walked: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise InputError where FSDP, ``fully_shard`` or tensor parallelism shards parameters of modules, with paths."""
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if fsdp is None and tensor is None:
        return  # nothing is sharded
    kinds = {type(module) for _, module in walked}.union(*[
        map(type, held.values()) for _, module in walked for held in (module._parameters, module._buffers) if held])
    sharding = (*(() if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)),
                *(() if tensor is None else (tensor.DTensor,)))
    for path, module in walked if any(issubclass(kind, sharding) for kind in kinds) else ():
        by = next((f"tensor parallelism (parallelize_module: {name} is a DTensor)" for name, held in (
            *module._parameters.items(), *module._buffers.items()) if tensor and isinstance(held, tensor.DTensor)), "")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            by = "fully_shard"
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            by = "FullyShardedDataParallel"
        if by:
            raise InputError(
                f"{path or 'the model'} ({type(module).__name__}) is sharded over ranks by {by}, so it runs with "
                "other ranks alone: build it in the function that `profile` is given, inside `with "
                "analyzer.parallel.world(ranks)`, or profile the module as it is before it is wrapped")


def explain_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
                 error: TypeError) -> str:
    """Why ``name``, a forward of that signature, cannot be called so, and what to give besides.

    >>> signature = inspect.signature(lambda ids, labels: None)
    >>> print(explain_call("forward", signature, (torch.ones(32, 256),), {}, TypeError()))
    forward(ids, labels) needs labels too; give it, e.g. --input labels=int64:32 on the command line
    """
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
        lacking = [p.name for p in signature.parameters.values() if p.name not in given and p.default is p.empty
                   and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    except TypeError:  # too many, or one of no such name
        said = ", ".join([*[f"{len(args)} by position"] * bool(args), *sorted(kwargs)])
        return f"{name}{signature} cannot be called with {said}: {error}"
    batch = next((str(len(t)) for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.ndim), "SIZES")
    inputs = " ".join(f"--input {name}=int64:{batch}" for name in lacking)
    return f"{name}{signature} needs {', '.join(lacking)} too; give it, e.g. {inputs} on the command line"
