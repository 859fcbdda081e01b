"""Names of the user's modules under which they imported functions and classes of torch before a mode began."""
from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
import torch.backends.cudnn
import torch.cuda

from analyzer.meta.intercept.legacy_type import list_types
from analyzer.meta.intercept.replacement import Undo, replace

# What asks no function of torch._C that is answered: flags of the module, classes, and a proxy's functions.
_PLACES = ((torch.cuda, "is_initialized"), (torch.cuda, "Stream"), (torch.cuda, "Event"),
           *((torch.backends.cudnn, name) for name in ("is_available", "version", "is_acceptable")))
_ORIGINALS = {id(original): (original, owner, name) for owner, name in (*_PLACES, *list_types())
              if (original := getattr(owner, name, None)) is not None}
_WHERE_NONE_IS = ("torch", "analyzer", "torchgen", "functorch", *sys.stdlib_module_names)
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
#: by id, namespaces of libraries that hold none of them, and how many names there were
_clean: dict[int, tuple[dict[str, Any], int]] = {}


def replacements() -> Iterator[Undo]:
    """Once torch's own names are answered: let those of other modules that mean the same be, too."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or (known := _clean.get(id(names))) is not None and known[1] == len(names):
            continue
        top = str(names.get("__name__")).partition(".")[0]
        found = () if top in _WHERE_NONE_IS and top != "__main__" else [
            name for name, value in names.items() if id(value) in _ORIGINALS]
        for name in found:
            _, owner, original_name = _ORIGINALS[id(names[name])]
            yield replace(module, name, lambda original, owner=owner, name=original_name: getattr(owner, name))
        if not found and (top in _WHERE_NONE_IS or str(names.get("__file__")).startswith(_LIBRARIES)):
            _clean[id(names)] = names, len(names)
