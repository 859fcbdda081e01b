"""Compiled modules in a profile: each is a level of the tree above the module that it wraps."""
from __future__ import annotations

import sys
from collections.abc import Collection

from torch import nn

from analyzer.fx.module_borrow import uncompiled
from analyzer.record.module_walk import walk_modules

WRAPPER_TYPE = "OptimizedModule"
_HELD = "_orig_mod"  # the name under which torch.compile's module holds the one that it wraps


def list_wrappers(module: nn.Module) -> frozenset[str]:
    """The paths of the compiled modules in ``module``, ``""`` for itself."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return frozenset()  # nothing is compiled
    return frozenset([path for path, inner in walk_modules(module) if uncompiled(inner) is not inner])


class ModulePaths:
    """Where modules stand in the model as its user has it, from their paths in a run without its ``wrappers``.

    >>> paths = ModulePaths({"fc"})
    >>> paths.find("fc"), paths.list_levels("fc"), paths.find("")
    ('fc._orig_mod', ['fc', 'fc._orig_mod'], '')
    """

    def __init__(self, wrappers: Collection[str] = ()) -> None:
        self._wrappers = wrappers

    def find(self, path: str) -> str:
        """The path of the module that is at ``path`` in the run."""
        return self.list_levels(path)[-1] if self._wrappers else path

    def list_levels(self, path: str) -> list[str]:
        """The paths of the wrappers right around that module, the outermost first, and its own."""
        if not self._wrappers:
            return [path]
        levels = [""]
        for name in [None, *path.split(".")] if path else [None]:
            if name is not None:
                levels = [join_path(levels[-1], name)]
            while levels[-1] in self._wrappers:
                levels.append(join_path(levels[-1], _HELD))
        return levels


def join_path(path: str, name: str) -> str:
    """The path of what the module at ``path`` holds under ``name``."""
    return f"{path}.{name}" if path else name
