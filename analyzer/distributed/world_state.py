"""Which world there is in this process: `torch.distributed` knows one, and so does this package."""
from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from analyzer.errors import InputError

from .world_spec import WorldSpec


class StageNotToldError(InputError):
    """A pipeline stage needs the shapes that a stage before it passes on, and no rank with that stage has run."""


@dataclass
class WorldState:
    """What is known of a world, beside what torch's own tables say."""

    spec: WorldSpec
    mail: dict[int, Any]  #: what pipeline stages were told by those before them, by stage
    threads: list[int]  #: the one that entered it, and those that joined
    schedules: list[Any] = field(default_factory=list)  #: of torch.distributed.pipelining, as the rank made them
    worked_for: list[Any] = field(default_factory=list)  #: modules that a wrapper works for now, the innermost last
    #: names of dimensions of meshes, by torch's name of the group that each has
    dimensions: dict[str, str] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)  #: as they were asked for, by the group's name
    is_adopted: bool = False  #: whether the program has called init_process_group itself


_lock = threading.Lock()
_there: WorldState | None = None
_kept_mails: list[dict[int, Any]] = []


def current_world_state() -> WorldState | None:
    """The state of the world that this thread is in."""
    state = _there
    return state if state is not None and threading.get_ident() in state.threads else None


def active_world_state() -> WorldState:
    """As `current_world_state`, where this thread is known to be in a world."""
    state = current_world_state()
    assert state is not None
    return state


def current_world() -> WorldSpec | None:
    """The world that this thread is in."""
    state = current_world_state()
    return None if state is None else state.spec


def is_world_elsewhere() -> bool:
    """Whether another thread is in a world, and this one is in none."""
    return _there is not None and current_world_state() is None


@contextmanager
def joined(spec: WorldSpec | None) -> Iterator[None]:
    """A block in which this thread is in the world ``spec`` that another one entered; in none for None."""
    state = _there
    if spec is None or state is None or spec is not state.spec:
        yield
        return
    state.threads.append(threading.get_ident())
    try:
        yield
    finally:
        state.threads.remove(threading.get_ident())


@contextmanager
def working_for(module: Any) -> Iterator[None]:
    """A block in which a wrapper works for ``module``, in whichever other module's hook it does."""
    worked_for = active_world_state().worked_for
    worked_for.append(module)
    try:
        yield
    finally:
        worked_for.pop()


def module_worked_for() -> Any:
    """The module that a wrapper works for now; None where it is the one that runs."""
    state = current_world_state()
    return state.worked_for[-1] if state is not None and state.worked_for else None


@contextmanager
def mail_kept() -> Iterator[dict[int, Any]]:
    """A block in which ranks that run one after the other find what earlier ones sent them: what stages were told."""
    mail: dict[int, Any] = {}
    _kept_mails.append(mail)
    try:
        yield mail
    finally:
        _kept_mails.pop()


@contextmanager
def entered(spec: WorldSpec) -> Iterator[None]:
    """A block in which ``spec`` is the world. Raises InputError in another, and while another thread is in one."""
    global _there
    thread = threading.get_ident()
    with _lock:
        if _there is not None:
            where = "" if _there.threads[0] == thread else " of another thread"
            raise InputError(f"world(size={spec.size}, rank={spec.rank}) inside a world of {_there.spec.size} ranks"
                             f"{where}: torch.distributed knows one world per process; leave that one first")
        _there = WorldState(spec, _kept_mails[-1] if _kept_mails else {}, [thread])
    try:
        yield
    finally:
        _there = None


@contextmanager
def launched(spec: WorldSpec) -> Iterator[None]:
    """A block in which the environment is that of a process that ``torchrun`` started."""
    told = spec.environment()
    before = {name: os.environ.get(name) for name in told}
    try:
        os.environ.update(told)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
