"""Whether replay is right with the installed torch, why something is not replayed, and which attributes code reads."""
from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from analyzer.output import hold_over_forks

_OLDEST = (2, 11)  # with 2.9.1 a random program aborted the process
CAPTURES = "it captures CUDA graphs, and a step that replays them is another than the one before"
USES_STREAMS = "it uses streams or events, or waits for the device"


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    return None


class Mismatch(Exception):
    """Something may not be replayed, and is run; the message says why."""


# Which attributes code reads from some modules, by wrapping ``__getattribute__`` of their classes for a while.

_MODULE_FILE = sys.modules[nn.Module.__module__].__file__
_Watch = tuple[dict[int, str], set[tuple[str, str]]]  # paths by id of the module, and what was read

_lock = threading.Lock()
hold_over_forks(_lock)


class _Watches(threading.local):
    active: tuple[_Watch, ...] = ()  # of one thread, the innermost last


_watches = _Watches()
#: by class: the watches that wrap it, and what it had itself before the first
_watched: dict[type, tuple[list[_Watch], Any]] = {}


@contextmanager
def watch_reads(root: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Collect (path, attribute) of every attribute that this thread reads from the modules below ``root``; "*" where it
    read a whole ``__dict__``. Watches may overlap, in one thread or several, and end in any order.
    """
    watch: _Watch = {id(m): path for path, m in root.named_modules()}, set()
    classes = {type(m) for m in root.modules()}
    try:
        with _lock:
            for cls in classes:
                _wrap(cls, watch)
        _watches.active += watch,
        yield watch[1]
    finally:
        _watches.active = tuple([other for other in _watches.active if other is not watch])
        with _lock:
            for cls in classes:
                _unwrap(cls, watch)


def _wrap(cls: type, watch: _Watch) -> None:
    watches, _ = _watched.setdefault(cls, ([], vars(cls).get("__getattribute__")))
    watches.append(watch)
    if len(watches) > 1:
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


def _unwrap(cls: type, watch: _Watch) -> None:
    """Undo what was done of `_wrap`, which may have failed or not been reached."""
    watches, before = _watched.get(cls, ([], None))
    watches[:] = [other for other in watches if other is not watch]
    if watches or _watched.pop(cls, None) is None:
        return
    if before is not None:
        cls.__getattribute__ = before  # type: ignore[method-assign]
    elif "__getattribute__" in vars(cls):
        del cls.__getattribute__
