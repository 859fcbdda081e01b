"""What is replaced in torch while a mode is active, and interrupts held back meanwhile."""
from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from analyzer.memory import allocator
from analyzer.meta.state import current
from analyzer.output import hold_over_forks

from .mode_stack import modes_taken_off

# Signals that wait. Python calls a handler between any two steps of the main thread, and what it raises leaves the code
# there: at the first step of an ``__exit__``, which then never runs, or in a finaliser, which swallows it. So handlers
# are replaced for the length of a run by some that look where the code is.

# What is not left halfway: ends of context managers, finalisers, callbacks of weak references, imports, and allocators.
_WHOLE = frozenset({"__enter__", "__exit__", "__del__", "_find_and_load", "when_gone"})
_WHOLE_FILES = (os.path.dirname(os.path.abspath(allocator.__file__)) + os.sep, weakref.__file__)

waiting: list[tuple[Callable[..., Any], int]] = []
"""Handlers that were not called yet, with their signals. Where it is not empty, `call_handlers` is due."""


class _Handler:
    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if _watch.users and not _watch.may_interrupt(frame):
            waiting.append((self.original, number))
            return None
        return self.original(number, frame)


class _Watch:
    def __init__(self) -> None:
        self.users = 0  #: blocks in which signals may have to wait
        self.holds = 0  #: blocks in which all do
        self._replaced: list[tuple[int, _Handler]] = []
        self._around: set[FrameType] = set()  # callers of the outermost block, which are not looked at

    def enter(self, frame: FrameType | None, holds: int) -> None:
        if self.users:  # counted by the last step: after an error no ``__exit__`` runs
            self.users, self.holds = self.users + 1, self.holds + holds
        else:
            try:
                self.users = self.holds = 1
                self._install(frame)
                self.holds = holds
            except BaseException:  # from a handler that was not replaced yet
                self._restore()
                raise

    def leave(self) -> None:
        if self.users > 1:
            self.users -= 1
        else:
            self.holds += 1
            self._restore()

    def _install(self, frame: FrameType | None) -> None:
        while frame is not None and (frame.f_code.co_name in ("__enter__", "enter_context")
                                     or frame.f_code.co_flags & inspect.CO_GENERATOR):
            frame = frame.f_back  # on the way to a block: the ``__enter__`` of a context manager, or a part of one
        while frame is not None:
            self._around.add(frame)
            frame = frame.f_back
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                mine = handler if isinstance(handler, _Handler) else _Handler(handler)
                self._replaced.append((number, mine))
                signal.signal(number, mine)

    def _restore(self) -> None:
        """Put back all handlers, also where a signal interrupts this as soon as its own is back. Another thread than
        the main one may not: they stay and let every signal through.
        """
        try:
            while self._replaced and threading.current_thread() is threading.main_thread():
                number, mine = self._replaced[-1]
                if signal.getsignal(number) is mine:
                    signal.signal(number, mine.original)
                self._replaced.pop()
            self._around.clear()
            self.holds = self.users = 0
        finally:
            if self.users:
                self._restore()

    def may_interrupt(self, frame: FrameType | None) -> bool:
        if self.holds:
            return False
        while frame is not None and frame not in self._around:
            code = frame.f_code
            if code.co_name in _WHOLE or code.co_filename.startswith(_WHOLE_FILES):
                return False
            frame = frame.f_back
        return True


_watch = _Watch()


def call_handlers() -> None:
    """Call the handlers of signals that waited, unless the caller must not be interrupted either."""
    if threading.current_thread() is threading.main_thread():
        _call_from(sys._getframe(1))


def _call_from(frame: FrameType | None) -> None:
    while waiting and (not _watch.users or _watch.may_interrupt(frame)):
        handler, number = waiting.pop(0)
        handler(number, frame)


class InterruptsDeferred:
    """In it, a signal that must not leave code halfway waits for the next operator under a mode or the block's end."""

    __slots__ = ("_is_watching",)
    _holds = 0

    def __enter__(self) -> None:
        self._is_watching = threading.current_thread() is threading.main_thread()
        if self._is_watching:
            _watch.enter(sys._getframe(1), self._holds)

    def __exit__(self, *exc: object) -> None:
        if self._is_watching:
            _watch.holds -= self._holds
            _watch.leave()
            _call_from(sys._getframe(1))


class InterruptsHeld(InterruptsDeferred):
    """While it is entered, every signal waits; the end of the block calls its handler.

    >>> from contextlib import suppress
    >>> done = []
    >>> with suppress(KeyboardInterrupt), InterruptsHeld():
    ...     signal.raise_signal(signal.SIGINT)
    ...     done.append("all")
    >>> done
    ['all']
    """

    __slots__ = ()
    _holds = 1


Undo = Callable[[], None]


_Link = list[Callable[[Any], Any]]  #: what makes a replacement: a list of one, so that equal functions are told apart


class _ReplacedAttribute:
    """The replacements of one attribute, one around the other; they may end in any order, as threads do."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.missing, self.own = name not in vars(owner), vars(owner).get(name)  # which may be a static method
        self.original = getattr(owner, name)
        self.links: list[_Link] = []
        self.value: Any = None  #: what was last set in its place

    def rebuild(self) -> None:
        value = self.original
        for (make,) in self.links:
            value = make(value)
            if self.name in ("__enter__", "__exit__"):  # by this name of a frame's code a signal waits
                value.__code__ = value.__code__.replace(co_name=self.name)
            if isinstance(self.own, staticmethod):
                value = staticmethod(value)
        if self.links:
            setattr(self.owner, self.name, value)
            self.value = value
        else:
            self.put_back()

    def is_as_found(self) -> bool:
        """Whether the owner's own attribute is what it was."""
        return not self.missing and vars(self.owner).get(self.name, self) is self.own

    def put_back(self) -> None:
        """Set the attribute to what it was."""
        if not self.missing:
            setattr(self.owner, self.name, self.own)
        elif self.name in vars(self.owner):  # or what was to replace it could not be made
            delattr(self.owner, self.name)


_chains: dict[tuple[int, str], _ReplacedAttribute] = {}
_chain_lock = threading.RLock()
hold_over_forks(_chain_lock)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Set ``owner.name`` to ``make(original)``; the result undoes it, whatever else replaced it meanwhile."""
    key, link = (id(owner), name), [make]
    undo = partial(_take_out, key, link)  # before there is something to undo
    _put_in(key, owner, link)
    return undo


def _put_in(key: tuple[int, str], owner: Any, link: _Link) -> None:
    with _chain_lock:
        chain = _chains.get(key) or _chains.setdefault(key, _ReplacedAttribute(owner, key[1]))
        chain.links.append(link)
        try:
            chain.rebuild()
        except BaseException:
            _take_out(key, link)
            raise


def replace_name(module: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """As `replace`, of a name in a program's module, which keeps what the program assigns to it meanwhile."""
    undo = replace(module, name, make)
    chain = _chains[id(module), name]

    def put_back() -> None:
        if vars(module).get(name) is not chain.value:
            chain.own, chain.missing = vars(module).get(name), name not in vars(module)
        undo()
    return put_back


def answer(owner: Any, name: str, simulated: Callable[..., Any], *, passes_original: bool = False,
           where: Callable[[], object | None] = current) -> Undo:
    """Call ``simulated`` (with the original before its arguments, if asked) where ``where()`` is not None."""
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


def _take_out(key: tuple[int, str], link: _Link) -> None:
    with _chain_lock:
        chain = _chains[key]
        chain.links[:] = [other for other in chain.links if other is not link]
        chain.rebuild()
        if not chain.links:
            del _chains[key]


class made_once:
    """Replacements that are the same in each block: what takes the place of each attribute is made in the first one.
    They are what a function yields: results of `replace` and `answer`, of one for each attribute.
    """

    def __init__(self, make: Callable[[], Iterable[Undo]]) -> None:
        self._make = make
        #: of each attribute: its key, what it was, the link around that, and what is set in its place
        self._rows: list[tuple[tuple[int, str], _ReplacedAttribute, _Link, Any]] = []

    def __call__(self) -> Iterator[Undo]:
        if self._rows:
            yield self._take_out  # before there is something to undo
            self._put_in()
            return
        made: list[Any] = []
        for undo in self._make():
            made.append(undo)
            yield undo
        with _chain_lock:
            rows = [(key, chain := _chains[key], link, vars(chain.owner)[chain.name])
                    for key, link in [undo.args for undo in made]]
            if all(chain.links == [link] for _, chain, link, _ in rows):  # or another replaces one of them now
                self._rows = rows

    def _put_in(self) -> None:
        with _chain_lock:
            for key, chain, link, value in self._rows:
                if key in _chains or not chain.is_as_found():
                    _put_in(key, chain.owner, link)
                else:
                    _chains[key] = chain
                    chain.links.append(link)
                    setattr(chain.owner, chain.name, value)

    def _take_out(self) -> None:
        with _chain_lock:
            for key, _, link, _ in reversed(self._rows):
                if key in _chains:
                    _take_out(key, link)


@contextmanager
def nothing_replaced() -> Iterator[None]:
    """A block in which every attribute is what it was, for all threads. None of them replaces others meanwhile."""
    with InterruptsHeld(), _chain_lock:
        now = [(chain, vars(chain.owner)[chain.name]) for chain in _chains.values() if chain.links]
        try:
            for chain, _ in now:
                chain.put_back()
            yield
        finally:
            for chain, value in now:
                setattr(chain.owner, chain.name, value)


# Modules that a program may import later: what is replaced in one is replaced as soon as it is there.

Make = Callable[[], Iterable[Undo]]
Load = Callable[[], None]


def answer_each(module: str, answers: Mapping[str, Callable[..., Any]],
                where: Callable[[], object | None] = current) -> Iterator[Undo]:
    """Answer instead of functions of a module, which must be imported; each result undoes one replacement."""
    for place, instead in answers.items():
        *path, name = place.split(".")
        owner = reduce(getattr, path, sys.modules[module])
        if hasattr(owner, name):  # versions differ
            yield answer(owner, name, instead, where=where)


class _Finder:
    """Finds the modules asked for as others do, and runs ``run(name, load)`` for each, where ``load()`` imports it."""

    def __init__(self, names: Collection[str], run: Callable[[str, Load], None]) -> None:
        self._names, self._run = names, run
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if module.__name__ == name:
                    self._run(name, partial(load, module))
                else:
                    load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def replaced_once_imported(makers: Mapping[str, Make]) -> Iterator[None]:
    """For the length of a block, make the replacements of each module in ``makers``: now, or when it is imported."""
    with ExitStack() as undo:
        def run(name: str, load: Load) -> None:
            load()
            for one in makers[name]():
                undo.callback(one)

        later = {name for name in makers if name not in sys.modules}
        for name in makers.keys() - later:
            run(name, lambda: None)
        undo.callback(_find_by(_Finder(later, run)))
        yield


def import_unreplaced(*names: str) -> Undo:
    """Until it is undone, modules that keep functions of torch when they are imported find them as they are."""
    def run(name: str, load: Load) -> None:
        with modes_taken_off(), nothing_replaced():
            load()

    return _find_by(_Finder(names, run))


def _find_by(finder: _Finder) -> Undo:
    sys.meta_path.insert(0, finder)
    return partial(sys.meta_path.remove, finder)
