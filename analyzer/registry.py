"""One kind of registry for every extension point."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, Generic, NamedTuple, TypeVar

from .errors import DuplicateRegistrationError, InputError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Callable[..., Any])
_Registry = TypeVar("_Registry", bound="Registry[Any, Any]")


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, None for a builtin that does not tell them."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


class Form(NamedTuple):
    """How what is registered will be called."""

    text: str  #: as errors show it
    arguments: int = 0  #: how many come by position, as far as that is known beforehand
    keywords: tuple[str, ...] = ()  #: those that always come

    def check(self, caller: str, impl: Any) -> None:
        """Raise InputError, which begins with ``caller``, for what cannot be called so."""
        if not callable(impl):
            raise InputError(f"{caller}: {impl!r} cannot be called; give a function that is called as {self.text}")
        signature = signature_of(impl)
        if signature is None:
            return
        try:
            signature.bind_partial(*[None] * self.arguments, **dict.fromkeys(self.keywords))
        except TypeError as error:
            raise InputError(f"{caller}: {impl!r}: {error}; it is called as {self.text}") from None


ANY_CALL = Form("f(...)")


def check_name(key: str, caller: str) -> str:
    """The key, if it is a name that fits in a command line. Raises InputError, which begins with ``caller``, else.

    >>> check_name("yaml", "register_exporter('yaml')")
    'yaml'
    """
    if isinstance(key, str) and key and not key.startswith("-") and not any(c.isspace() or c == "=" for c in key):
        return key
    example = f"@{caller.partition('(')[0]}(\"name\")"
    raise InputError(f"{caller}: must be a name, as in {example}: text without blanks and '=', that begins with no '-'")


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

    def __init__(self, name: str, check_key: Callable[[K, str], K] = lambda key, caller: key,
                 call: Form = ANY_CALL) -> None:
        """``check_key(key, caller)`` gives the key that is used, or raises InputError for one that cannot be meant."""
        self.name = name
        self._check_key, self._call = check_key, call
        self._changes = [0]  # of this kind of entry and those beside it
        self._table: dict[K, V] = {}
        self._scoped: list[set[K]] = []  # per open scope: keys registered inside it

    def beside(self: _Registry, name: str, check_key: Callable[[Any, str], Any] | None = None,
               call: Form | None = None) -> _Registry:
        """Another kind of entry of the same registry, with a decorator, keys and scopes of its own.

        >>> register_demo = Registry("register_demo")
        >>> register_other = register_demo.beside("register_other")
        >>> _ = register_other("twice", lambda x: 2 * x)
        >>> "twice" in register_demo, register_demo.version
        (False, 1)
        """
        other = copy(self)
        other.name, other._table, other._scoped = name, {}, []
        other._check_key, other._call = check_key or self._check_key, call or self._call
        return other

    @property
    def version(self) -> int:
        """Grows with every change, so that what was derived from the registry can tell that it is stale."""
        return self._changes[0]

    def fill(self) -> None:
        """Register what comes with the package: called before each use, for a table that is filled at the first one."""

    def __call__(self, key: K, impl: V | None = None, *, override: bool = False) -> Any:
        """Register ``impl``, or return a decorator. DuplicateRegistrationError where taken, unless ``override``;
        InputError for a key that nothing would find, and for what cannot be called as it will be.
        """
        self.fill()
        known = self._check_key(key, caller := f"{self.name}({key!r})")

        def register(impl: V) -> V:
            self._call.check(caller, impl)
            return self.add(known, impl, override)

        return register if impl is None else register(impl)

    def add(self, key: K, impl: V, override: bool = False) -> V:
        """Register ``impl`` as it is, without filling the table first."""
        may_replace = override or (self._scoped and key not in self._scoped[-1])
        if key in self._table and not may_replace:
            raise DuplicateRegistrationError(
                f"{self.name}({key!r}): already registered as {self._table[key]!r}; "
                f"pass override=True, or register inside `with {self.name}.scope():` to replace it for a while")
        if self._scoped:
            self._scoped[-1].add(key)
        self._table[key] = impl
        self._changes[0] += 1
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
            self._changes[0] += 1


_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def adding_to(rules: dict[Any, Any]) -> Callable[..., Callable[[_Rule], _Rule]]:
    """The decorator that puts a function into a table of rules, under each of the operators that it is given."""
    def of(*operators: Any) -> Callable[[_Rule], _Rule]:
        def add(rule: _Rule) -> _Rule:
            assert rules.keys().isdisjoint(operators), operators
            rules.update(dict.fromkeys(operators, rule))
            return rule
        return add
    return of
