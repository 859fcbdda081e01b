"""Names of the user's modules under which they imported functions and classes of torch before a mode began."""
from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.backends.cudnn
import torch.cuda

from analyzer.meta.intercept.legacy_type import list_types
from analyzer.meta.intercept.replacement import Undo, replace_name

# What asks no function of torch._C that is answered: flags of the module, classes, and a proxy's functions.
_PLACES = (*((torch.cuda, name) for name in (
               "is_initialized", "Stream", "Event", "ExternalStream", "MemPool", "use_mem_pool", "CUDAGraph",
               "graph_pool_handle", "is_current_stream_capturing", "list_gpu_processes", "device_memory_used",
               "initial_seed")),
           *((torch.accelerator, name) for name in ("Graph", "get_device_capability")),
           *((torch.backends.cuda, name) for name in ("is_built", "is_flash_attention_available")),
           *((torch, name) for name in ("Stream", "Event", "Generator")),
           *((torch.backends.cudnn, name) for name in ("is_available", "version", "is_acceptable")))
_ORIGINALS = {id(original): (original, owner, name) for owner, name in (*_PLACES, *list_types())
              if (original := getattr(owner, name, None)) is not None}
_WHERE_NONE_IS = ("torch", "analyzer", "torchgen", "functorch", *sys.stdlib_module_names)
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_watched: list[Any] = []  #: modules of programs, and of libraries that have such names
_looked_at = 0  #: how many modules there were when these were searched for


def replacements() -> Iterator[Undo]:
    """Once torch's own names are answered: let those of other modules that mean the same be, too."""
    global _looked_at
    if len(sys.modules) != _looked_at:
        _watched[:] = filter(_may_have_some, list(sys.modules.values()))
        _looked_at = len(sys.modules)
    for module in _watched:
        for name in [name for name, value in vars(module).items() if id(value) in _ORIGINALS]:
            _, owner, original_name = _ORIGINALS[id(vars(module)[name])]
            yield replace_name(module, name, partial(_take_from, owner, original_name))


def _may_have_some(module: Any) -> bool:
    names = getattr(module, "__dict__", None)
    if type(names) is not dict:
        return False
    top = str(names.get("__name__")).partition(".")[0]
    if top in _WHERE_NONE_IS and top != "__main__":
        return False
    return not str(names.get("__file__")).startswith(_LIBRARIES) or any(
        [id(value) in _ORIGINALS for value in list(names.values())])


def _take_from(owner: Any, name: str, original: Any) -> Any:
    return getattr(owner, name)
