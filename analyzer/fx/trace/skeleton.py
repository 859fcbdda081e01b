"""What a graph module holds: the modules and tensors that its graph names, at the paths of the original."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from analyzer.fx.borrowed import Borrowed
from analyzer.fx.module_borrow import uncompiled

from .call_target import HeldModule
from .tape import Tape

Tensor = torch.Tensor


def collect_contents(tape: Tape, borrowed: Borrowed) -> dict[str, Any]:
    """What the graph module holds, by path: modules, original tensors and constants."""
    originals = {path: original for group in (borrowed.parameters, borrowed.buffers) for path, _, original in group}
    targets = {n.target: None for n in tape.graph.nodes if n.op in ("call_module", "get_attr")}
    contents: dict[str, Any] = {}
    for target in targets:
        held = tape.constants.get(target, originals.get(target))
        contents[target] = borrowed.by_path[target] if held is None else held
    # code of the root may use whatever the root has
    if any(isinstance(held, HeldModule) for held in contents.values()):
        contents.update({name: child for name, child in borrowed.root._modules.items() if child is not None})
        contents.update({path: original for path, original in originals.items() if "." not in path})
    return contents


def build_skeleton(root: nn.Module, contents: dict[str, Any]) -> nn.Module:
    """A module that holds ``contents`` at their paths, in bare modules with the training flags of the originals."""
    top = nn.Module()
    top.training = root.training
    whole = {path for path, value in contents.items() if isinstance(value, nn.Module)}
    for path in sorted(contents, key=lambda p: p.count(".")):
        *owners, name = path.split(".")
        if any(".".join(owners[:i]) in whole for i in range(1, len(owners) + 1)):
            continue  # comes with a module that is there as a whole
        owner, source = top, root
        for part in owners:
            source = source._modules.get(part, source) or source
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
                owner._modules[part].training = uncompiled(source).training  # type: ignore[union-attr]
            source = uncompiled(source)
            owner = owner._modules[part]  # type: ignore[assignment]
        _hold(owner, name, contents[path], source)
    return top


def _hold(owner: nn.Module, name: str, value: Any, source: nn.Module) -> None:
    if isinstance(value, nn.Module):
        owner._modules[name] = value
    elif isinstance(value, nn.Parameter):
        owner._parameters[name] = value
    elif isinstance(value, Tensor):
        owner._buffers[name] = value
        if name.startswith("_tensor_constant") or name in source._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.add(name)
    else:
        object.__setattr__(owner, name, value)
