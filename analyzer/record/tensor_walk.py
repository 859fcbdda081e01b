"""Tensors, modules and parameters found in what a user gives."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import nn

from analyzer.meta.spec import LEAVES, TensorSpec, spec_of
from analyzer.meta.tensor import PLAIN_TENSORS, is_around_tensors, names_of_parts

# The modules of a model and their paths, as ``named_modules()`` gives them but without a generator for each level.

REGISTRIES = ("_parameters", "_buffers", "_modules")  #: attributes of a module that hold what it registers


def walk_modules(root: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """(path, module) of ``root`` and of all below it, each once, under its first path, a module before those that it
    holds.

    >>> walk_modules(nn.Sequential(nn.ReLU()))
    [('', Sequential(
      (0): ReLU()
    )), ('0', ReLU())]
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting: list[tuple[str, nn.Module]] = [(prefix, root)]
    while waiting:
        path, module = pair = waiting.pop()
        if id(module) not in found:
            found[id(module)] = pair
            if held := module._modules:  # most hold none
                above = path + "." if path else ""
                waiting += [(above + name, child) for name, child in reversed(held.items()) if child is not None]
    return list(found.values())


#: what ``parameters()`` asks of a module and of those below it
_LISTING = ("parameters", "named_parameters", "named_modules", "_named_members")


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that repeat: they hold modules, in a list or sequence that holds another of their class.

    What is checkpointed or compiled one by one, as users wrap it. They need not be alike (`analyzer.replay.chain`): the
    blocks of a Swin transformer are of one class and of several widths.
    """
    children = [child for child in model.children()]
    kinds = [type(child) for child in children]
    for child, kind in zip(children, kinds):
        in_list = isinstance(model, (nn.ModuleList, nn.Sequential))
        is_container = issubclass(kind, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if in_list and not is_container and kinds.count(kind) > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from list_blocks(child)


def list_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module, as its ``parameters()`` gives them.

    >>> [tuple(parameter.shape) for parameter in list_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    [(3, 2), (3,)]
    """
    modules: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            if held := module._modules:
                waiting += [child for child in reversed(held.values()) if child is not None]
    for kind in set(map(type, modules.values())):
        if any([getattr(kind, name) is not getattr(nn.Module, name) for name in _LISTING]):
            return list(root.parameters())  # its own way to list them
    return list({id(parameter): parameter for module in modules.values() if module._parameters
                 for parameter in module._parameters.values() if parameter is not None}.values())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts: Iterable[Any] = ()
    if isinstance(tree, (list, tuple, set, dict)):
        parts = tree.values() if isinstance(tree, dict) else tree
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        parts = [getattr(tree, name, None) for name in tree.__dataclass_fields__]
    return [tensor for part in parts if type(part) not in LEAVES for tensor in tensors_in(part)]


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor. Their module is slow to import: there are none before something did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> torch.Tensor:
    """What this process has of a tensor: the part of a DTensor, what a collective that is under way gives."""
    while type(tensor) not in PLAIN_TENSORS:
        # of torch.distributed.tensor.DTensor, and of AsyncCollectiveTensor in _functional_collectives.py
        inner = getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))
        if not isinstance(inner, torch.Tensor):
            break
        tensor = inner
    return tensor  # type: ignore[no-any-return]


def describe(tensor: torch.Tensor) -> TensorSpec:
    with torch._C.DisableTorchFunction():
        return spec_of(tensor)


def describe_tensors(tree: Any) -> tuple[TensorSpec, ...]:
    with torch._C.DisableTorchFunction():
        return tuple([spec_of(local_part(t)) for t in tensors_in(tree)])


# What quantized parameters are made of: those of bitsandbytes keep scales beside their elements, and several elements
# in a byte; those of torchao are tensors around tensors.

PARAMETER, BUFFER = "parameter", "buffer"


def parts_of_parameter(parameter: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(suffix of its name, category, tensor) of each tensor that a parameter is or keeps."""
    if is_around_tensors(parameter):
        for name in names_of_parts(parameter):
            for suffix, category, part in parts_of_parameter(getattr(parameter, name)):
                yield f".{name}{suffix}", category, part
        return
    yield "", PARAMETER, parameter
    attributes = parameter.__dict__
    if (partition := partition_of(parameter)) is not None:
        yield ".ds_tensor", PARAMETER, partition
    scales = attributes.get("SCB")  # bitsandbytes.nn.Int8Params
    if isinstance(scales, torch.Tensor):
        yield ".SCB", BUFFER, scales
    state = attributes.get("quant_state")  # bitsandbytes.nn.Params4bit
    for prefix, held in (("", state), (".state2", getattr(state, "state2", None))):
        for name in ("absmax", "code", "offset"):
            value = getattr(held, name, None)
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", BUFFER, value


def partition_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The rank's own part of a parameter under ZeRO-3, which is itself empty but where it is gathered; None of others.
    Source: deepspeed/runtime/zero/partition_parameters.py, ``_partition_param``.
    """
    found = parameter.__dict__.get("ds_tensor")
    return found if isinstance(found, torch.Tensor) else None


def count_elements(parameter: torch.Tensor) -> int:
    """The elements of a parameter, of which several may be packed in one of a tensor; of a sharded one the part's."""
    if (part := getattr(parameter, "_local_tensor", None)) is not None:
        return count_elements(part)
    if (partition := partition_of(parameter)) is not None:
        return partition.numel()
    state: Any = parameter.__dict__.get("quant_state")
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else prod(shape)
