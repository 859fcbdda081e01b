"""Modules that run with a model and are no part of it: given as arguments, or reached by its loss function or step."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.structure import find_paths
from analyzer.record.tensor_walk import walk_modules


def list_given(root: nn.Module, named: Iterable[tuple[str, object]]) -> dict[str, nn.Module]:
    """The modules in arguments, ``named`` by forward, that hold tensors and are not in ``root``, by paths beside its
    own: ``heads_0`` is ``heads[0]``.
    """
    inside = {id(module) for _, module in walk_modules(root)}
    found: dict[str, nn.Module] = {}
    for name, value in named:
        for steps, module in find_paths(value, nn.Module):
            if id(module) not in inside and any(m._parameters or m._buffers for m in module.modules()):
                inside.update(map(id, module.modules()))
                found[_free_path(root, found, "_".join([name, *[str(step.key) for step in steps]]))] = module
    return found


def add_reached(root: nn.Module, known: Mapping[str, nn.Module], reached: Iterable[nn.Module],
                leaf: torch.Tensor) -> dict[str, nn.Module] | None:
    """``known`` and the module among those ``reached`` that has the parameter ``leaf``; None where none has."""
    for module in reached:
        if not any(module is one for one in known.values()) and any(p is leaf for p in module.parameters()):
            return {**known, _free_path(root, known, type(module).__name__): module}
    return None


def _free_path(root: nn.Module, found: Mapping[str, nn.Module], name: str) -> str:
    path = re.sub(r"\W", "_", name)
    while path in found or hasattr(root, path):
        path += "_"
    return path


def describe_further(further: Mapping[str, nn.Module], mode: str, optimizer: object, step: object) -> list[str]:
    """A sentence on each module that runs with the model: what of the profile it is in."""
    found = []
    for path, module in further.items():
        count = sum(p.numel() for p in module.parameters())
        if not count:
            continue
        text = (f"{path} ({type(module).__name__}) is no part of the model and runs with it: its {count:,} parameters "
                "are among those of the profile")
        if mode == "train" and optimizer is not None and any(p.requires_grad for p in module.parameters()):
            text += ", and the optimizer trains them" if step is None else (
                ", but not of the optimizer that step is given, which has the model's own")
        found.append(text)
    return found


def refuse_outside(named: Iterable[tuple[str, object]]) -> None:
    """Raise InputError where an argument is a module that was built outside of a world."""
    for name, value in named:
        for _, module in find_paths(value, nn.Module):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.layout is torch.strided and not isinstance(find_storage(tensor), MetaStorage):
                    raise InputError(f"{name}: a {type(module).__name__} that was built outside of the world is given "
                                     "as an argument, and no rank has it; build it in the function that `profile` is "
                                     "given, as a part of the model")
