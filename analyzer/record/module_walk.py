"""The modules of a model and their paths, as ``named_modules()`` gives them but without a generator for each level."""
from __future__ import annotations

from torch import nn

REGISTRIES = ("_parameters", "_buffers", "_modules")  #: attributes of a module that hold what it registers


def walk_modules(root: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """(path, module) of ``root`` and of all below it, each once, under its first path, a module before those that it
    holds.

    >>> walk_modules(nn.Sequential(nn.ReLU()))
    [('', Sequential(
      (0): ReLU()
    )), ('0', ReLU())]
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [(prefix, root)]
    while waiting:
        pair = waiting.pop()
        path, module = pair
        key = id(module)
        if key in seen:
            continue
        seen.add(key)
        found.append(pair)
        children = module._modules
        if children:
            above = path + "." if path else ""
            waiting += [(above + name, child) for name, child in reversed(list(children.items())) if child is not None]
    return found
