"""Names of a package that are imported when they are used first."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def find_later(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package`` (PEP 562) for the names in ``places``, which says in which module each is.

    >>> find_later("analyzer", {"parse_bytes": "analyzer.units"})("parse_bytes")("1KiB")
    1024
    """
    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
