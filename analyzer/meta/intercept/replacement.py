"""Attributes of torch that are replaced for a while, and put back whatever else replaced them meanwhile."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from analyzer.fork import hold_over_forks
from analyzer.meta.state import current

from .interrupt import InterruptsHeld

Undo = Callable[[], None]


class SharedReplacements:
    """Replacements that the first of several users makes and the last puts back, in reverse."""

    def __init__(self, make: Callable[[], Iterable[Undo]]) -> None:
        self._make = make
        self.lock = threading.RLock()
        self._users = 0
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Count one more user."""
        with self.lock:
            try:
                if self._users == 0:
                    self._undo.extend(self._make())  # no step of Python's between a replacement and its place here
                self._users += 1
            except BaseException:
                if self._users == 0:
                    self._put_back()
                raise

    def uninstall(self) -> None:
        """Count one less."""
        with self.lock:
            self._users -= 1
            if self._users == 0:
                self._put_back()

    def _put_back(self) -> None:
        """Undo all, whatever one of them raises."""
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            if self._undo:
                self._put_back()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """One more user for the length of a block."""
        counted = False
        try:
            with InterruptsHeld():
                self.install()
                counted = True
            yield
        finally:
            if counted:
                with InterruptsHeld():
                    self.uninstall()


class _Chain:
    """The replacements of one attribute, one around the other; they may end in any order, as threads do."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.missing, self.own = name not in vars(owner), vars(owner).get(name)  # which may be a static method
        self.original = getattr(owner, name)
        self.links: list[list[Callable[[Any], Any]]] = []  # lists of one, so that equal functions are told apart

    def rebuild(self) -> None:
        value = self.original
        for (make,) in self.links:
            value = make(value)
            if self.name in ("__enter__", "__exit__"):  # by this name of a frame's code a signal waits
                value.__code__ = value.__code__.replace(co_name=self.name)
            if isinstance(self.own, staticmethod):
                value = staticmethod(value)
        if self.links or not self.missing:
            setattr(self.owner, self.name, value if self.links else self.own)
        elif self.name in vars(self.owner):  # or what was to replace it could not be made
            delattr(self.owner, self.name)


_chains: dict[tuple[int, str], _Chain] = {}
_chain_lock = threading.RLock()
hold_over_forks(_chain_lock)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Set ``owner.name`` to ``make(original)``; the result undoes it, whatever else replaced it meanwhile."""
    key, link = (id(owner), name), [make]
    undo = partial(undo_link, key, link)  # before there is something to undo
    with _chain_lock:
        chain = _chains.get(key) or _chains.setdefault(key, _Chain(owner, name))
        chain.links.append(link)
        try:
            chain.rebuild()
        except BaseException:
            undo()
            raise
    return undo


def answer(owner: Any, name: str, simulated: Callable[..., Any], *, passes_original: bool = False,
           where: Callable[[], object | None] = current) -> Undo:
    """Call ``simulated`` (with the original before its arguments, if asked) where ``where()`` is not None: by default
    in threads in which a mode is active.
    """
    def make(original: Any) -> Any:
        instead = partial(simulated, original) if passes_original else simulated
        def call(*args: Any, **kwargs: Any) -> Any:
            return (original if where() is None else instead)(*args, **kwargs)
        return call
    return replace(owner, name, make)


def supply(owner: Any, name: str, value: Any) -> Undo:
    """Set ``owner.name``, which this build of a library may lack; the result undoes it."""
    if hasattr(owner, name):
        return lambda: None
    undo = partial(delattr, owner, name)
    setattr(owner, name, value)
    return undo


def undo_link(key: tuple[int, str], link: list[Callable[[Any], Any]]) -> None:
    """Take one replacement out of its chain."""
    with _chain_lock:
        chain = _chains[key]
        chain.links[:] = [other for other in chain.links if other is not link]
        chain.rebuild()
        if not chain.links:
            del _chains[key]
