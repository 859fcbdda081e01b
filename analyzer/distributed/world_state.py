"""Which world there is in this process: `torch.distributed` knows one, and so does this package."""
from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from analyzer.errors import InputError

from .world_spec import WorldSpec


class StageNotToldError(InputError):
    """A pipeline stage needs the shapes that a stage before it passes on, and no rank with that stage has run."""


_lock = threading.Lock()
_worlds: list[tuple[WorldSpec, int]] = []  # the one that there is, and the thread that entered it
_joined: list[int] = []  # other threads that are in it
_mail: dict[int, Any] = {}  # what pipeline stages were told, by stage; kept from rank to rank in `mail_kept`
_keeps = [0]
_schedules: list[Any] = []  # of torch.distributed.pipelining, in the order in which the rank made them
_worked_for: list[Any] = []  # modules, the innermost last
_dimensions: dict[str, str] = {}  # by name of the group that was there before: for all ranks, torch makes no other


def current_world() -> WorldSpec | None:
    """The world that this thread is in."""
    return _worlds[-1][0] if _worlds and threading.get_ident() in (_worlds[-1][1], *_joined) else None


def known_world() -> WorldSpec:
    """As `current_world`, where this thread is known to be in one."""
    spec = current_world()
    assert spec is not None
    return spec


@contextmanager
def joined(spec: WorldSpec | None) -> Iterator[None]:
    """A block in which this thread is in the world ``spec`` that another one entered; in none for None."""
    if spec is None or spec is not (_worlds[-1][0] if _worlds else None):
        yield
        return
    _joined.append(threading.get_ident())
    try:
        yield
    finally:
        _joined.remove(threading.get_ident())


def is_world_elsewhere() -> bool:
    """Whether another thread is in a world."""
    return bool(_worlds) and current_world() is None


def current_mail() -> dict[int, Any]:
    """What pipeline stages were sent by those before them, by stage."""
    return _mail


def made_schedules() -> list[Any]:
    """The pipeline schedules that the rank of this world has made."""
    return _schedules


def mesh_dimensions() -> dict[str, str]:
    """The names of dimensions of meshes of this world, by torch's name of the group that each has."""
    return _dimensions


@contextmanager
def working_for(module: Any) -> Iterator[None]:
    """A block in which a wrapper works for ``module``, in whichever other module's hook it does."""
    _worked_for.append(module)
    try:
        yield
    finally:
        _worked_for.pop()


def module_worked_for() -> Any:
    """The module that a wrapper works for now; None where it is the one that runs."""
    return _worked_for[-1] if _worked_for else None


@contextmanager
def mail_kept() -> Iterator[None]:
    """A block in which ranks that run one after the other find what earlier ones sent them."""
    _keeps[0] += 1
    try:
        yield
    finally:
        _keeps[0] -= 1
        _mail.clear()


@contextmanager
def entered(spec: WorldSpec) -> Iterator[None]:
    """A block in which ``spec`` is the world. Raises InputError in another, and while another thread is in one."""
    with _lock:
        if _worlds:
            where = "" if _worlds[-1][1] == threading.get_ident() else " of another thread"
            raise InputError(f"world(size={spec.size}, rank={spec.rank}) inside a world of {_worlds[-1][0].size} ranks"
                             f"{where}: torch.distributed knows one world per process; leave that one first")
        _worlds.append((spec, threading.get_ident()))
    try:
        yield
    finally:
        _worlds.pop()
        _schedules.clear()
        _dimensions.clear()
        if not _keeps[0]:
            _mail.clear()


@contextmanager
def launched(spec: WorldSpec) -> Iterator[None]:
    """A block in which the environment is that of a process that ``torchrun`` started."""
    told = spec.environment()
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
