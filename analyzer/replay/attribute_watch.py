"""Which attributes code reads from some modules, by wrapping ``__getattribute__`` of their classes for a while."""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from analyzer.fork import hold_over_forks

_MODULE_FILE = sys.modules[nn.Module.__module__].__file__
_lock = threading.Lock()
hold_over_forks(_lock)
_wrapped: dict[type, tuple[int, Any]] = {}  # how many watches wrap a class, and what it had itself before the first


class _Watches(threading.local):
    """Of one thread, the innermost last: paths by id of the module, and what was read."""

    def __init__(self) -> None:
        self.active: list[tuple[dict[int, str], set[tuple[str, str]]]] = []


_watches = _Watches()


@contextmanager
def watch_reads(root: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Collect (path, attribute) of every attribute that this thread reads from the modules below ``root``; "*" where it
    read a whole ``__dict__``. Watches may overlap, in one thread or several, and end in any order.
    """
    watch: tuple[dict[int, str], set[tuple[str, str]]] = {id(m): path for path, m in root.named_modules()}, set()
    classes = {type(m) for m in root.modules()}
    with _lock:
        for cls in classes:
            _wrap(cls)
    _watches.active.append(watch)
    try:
        yield watch[1]
    finally:
        _watches.active.remove(watch)
        with _lock:
            for cls in classes:
                _unwrap(cls)


def _wrap(cls: type) -> None:
    count, before = _wrapped.get(cls, (0, cls.__dict__.get("__getattribute__")))
    _wrapped[cls] = count + 1, before
    if count:
        return
    original = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        for paths, reads in _watches.active:
            path = paths.get(id(self))
            if path is None:
                continue
            if name != "__dict__":
                reads.add((path, name))
            elif (caller := sys._getframe(1).f_code).co_filename != _MODULE_FILE or caller.co_name == "__dir__":
                reads.add((path, "*"))
        return original(self, name)  # type: ignore[call-arg]

    __getattribute__.__wrapped__ = original  # type: ignore[attr-defined]
    cls.__getattribute__ = __getattribute__  # type: ignore[method-assign,assignment]


def _unwrap(cls: type) -> None:
    count, before = _wrapped.pop(cls)
    if count > 1:
        _wrapped[cls] = count - 1, before
    elif before is None:
        del cls.__getattribute__
    else:
        cls.__getattribute__ = before  # type: ignore[method-assign]
