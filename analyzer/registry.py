"""One kind of registry for every extension point."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from .errors import DuplicateRegistrationError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Callable[..., Any])


class Registry(Generic[K, V]):
    """A table of implementations, filled by decorator or by call, that refuses duplicates.

    >>> register_demo = Registry("register_demo")
    >>> @register_demo("twice")
    ... def twice(x):
    ...     return 2 * x
    >>> register_demo.find("twice")(21)
    42

    Registrations made inside ``scope()`` are undone at its end and may replace earlier ones:

    >>> with register_demo.scope():
    ...     _ = register_demo("twice", lambda x: x + x + 1)
    ...     register_demo.find("twice")(1)
    3
    >>> register_demo.find("twice")(1)
    2
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0  #: grows with every change, so that what was derived from the table can tell that it is stale
        self._table: dict[K, V] = {}
        self._scoped: list[set[K]] = []  # per open scope: keys registered inside it

    def fill(self) -> None:
        """Register what comes with the package: called before each use, for a table that is filled at the first one."""

    def __call__(self, key: K, impl: V | None = None, *, override: bool = False) -> Any:
        """Register ``impl``, or return a decorator. DuplicateRegistrationError where taken, unless ``override``."""
        self.fill()
        return self.add(key, impl, override) if impl is not None else lambda f: self(key, f, override=override)

    def add(self, key: K, impl: V, override: bool = False) -> V:
        """Register ``impl``, without filling the table first."""
        may_replace = override or (self._scoped and key not in self._scoped[-1])
        if key in self._table and not may_replace:
            raise DuplicateRegistrationError(
                f"{self.name}({key!r}): already registered as {self._table[key]!r}; "
                f"pass override=True, or register inside `with {self.name}.scope():` to replace it for a while")
        if self._scoped:
            self._scoped[-1].add(key)
        self._table[key] = impl
        self.version += 1
        return impl

    def find(self, key: K) -> V | None:
        """The implementation for ``key``, or None."""
        self.fill()
        return self._table.get(key)

    def __contains__(self, key: K) -> bool:
        self.fill()
        return key in self._table

    def __iter__(self) -> Iterator[K]:
        self.fill()
        return iter(self._table)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Undo, at the end of the block, every registration made inside it."""
        self.fill()
        before = dict(self._table)
        self._scoped.append(set())
        try:
            yield
        finally:
            self._scoped.pop()
            self._table.clear()
            self._table.update(before)
            self.version += 1
