"""Names that are imported when they are used first, and Python's garbage collector kept quiet meanwhile."""
from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from analyzer.output import hold_over_forks

# Keeps Python's garbage collector from walking a run's records again and again while they grow.
#
# The records' objects would start collections that an eager run does not have (two eager steps of a ResNet-50 on a CPU
# with AdamW make none), and most are kept: `profile(reuse=False)` of a ResNet-152 makes 6 at ten times Python's
# threshold and 1 at a hundred, and its resident peak is the same, 20 MiB above what was there (`gc.callbacks`,
# `resource.getrusage`, Python 3.11).
_RARER = 100
_MOST = 2**31 - 1  # a C int

_lock = threading.Lock()
hold_over_forks(_lock)
_users = 0
_before = gc.get_threshold()  # of the present users


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let a hundred times as many objects be made between collections in the block, however many blocks are open;
    with torch 2.9, and while torch itself is imported, nothing is collected.

    Nothing is set aside (`gc.freeze`): that also sets the collector's counts to zero, and a program that profiles in a
    loop would never collect its old objects again.
    """
    global _users, _before
    is_counted = False
    try:
        with _lock:
            _users += 1
            is_counted = True
            if _users == 1:
                _before = gc.get_threshold()
                first = min(_RARER * _before[0], _MOST) if _can_collect() else 0
                gc.set_threshold(first, *_before[1:])  # 0 stays 0: the caller wants none
        yield
    finally:
        with _lock:
            _users -= is_counted
            if is_counted and not _users:
                gc.set_threshold(*_before)


def _can_collect() -> bool:
    """Torch 2.9 sometimes aborts the process ("owns_pyobj() INTERNAL ASSERT FAILED") where Python collects while a
    storage is made; 2.10 keeps the Python objects of storages another way (pytorch/pytorch#166342).
    """
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return version is not None and not str(version).startswith("2.9.")


def load(place: str) -> Any:
    """What is at a place such as ``analyzer.cli:main``; its file is imported now.

    >>> load("analyzer.units:parse_bytes")("1KiB")
    1024
    """
    module, _, name = place.partition(":")
    # collections, which so many new objects set off, would walk all of torch: a third of an import's time
    with rare_collections():
        return getattr(importlib.import_module(module), name)


def find_later(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package`` (PEP 562) for the names in ``places``: module -> its names in one text.

    >>> find_later("analyzer", {"analyzer.units": "format_bytes parse_bytes"})("parse_bytes")("1KiB")
    1024
    """
    place_of = {name: place for place, names in places.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in place_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = load(f"{place_of[name]}:{name}")
        setattr(sys.modules[package], name, found)
        return found

    return find
