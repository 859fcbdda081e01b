"""Specs that can be named: those that come with the package, and how to add one."""
from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from analyzer.errors import DuplicateRegistrationError, InputError
from analyzer.registry import Registry


class Named(Protocol):
    """What a catalogue holds."""

    @property
    def name(self) -> str:
        """What it is known by."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """What else it is known by."""


S = TypeVar("S", bound=Named)


def fold_name(name: str) -> str:
    """A name as names are compared: case, spaces, hyphens and underscores do not tell them apart.

    >>> fold_name(" NVIDIA A100-SXM4-80GB")
    'nvidia_a100_sxm4_80gb'
    """
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


class _Specs(Registry[str, Any]):  # Any: a registry's values are callables elsewhere, here they are specs
    """Specs by name, those that come with the package read at the first use."""

    def __init__(self, name: str, read: Callable[[], Iterable[Named]], fold: Callable[[str], str]) -> None:
        super().__init__(name)
        self.is_filled = False
        self._read, self._fold, self._lock = read, fold, threading.RLock()

    def fill(self) -> None:
        with self._lock:
            if not self.is_filled:
                shipped = list(self._read())
                self.is_filled = True
                for spec in shipped:
                    self.add(self._fold(spec.name), spec)


class SpecCatalogue(Generic[S]):
    """Specs of ``kind`` by name and alias, as ``fold`` compares them; ``read`` gives those that come with the package.

    Calling it registers a spec and returns it. A name that is taken is refused, unless ``override`` is true or the
    call stands inside ``scope()``, which undoes its registrations at the end; an alias of another spec always is.
    ``noun`` and ``example`` stand in errors.
    """

    def __init__(self, kind: type[S], noun: str, example: str, read: Callable[[], Iterable[S]],
                 fold: Callable[[str], str] = fold_name) -> None:
        self.kind, self.noun, self.example, self.fold = kind, noun, example, fold
        self._specs = _Specs(f"register_{noun}", read, fold)
        self._named: dict[str, S] = {}
        self._named_version = -1

    @property
    def is_filled(self) -> bool:
        """Whether what comes with the package has been read."""
        return self._specs.is_filled

    def __call__(self, spec: S, *, override: bool = False) -> S:
        """Raises InputError for what is no spec of this kind, DuplicateRegistrationError if a name of it is taken."""
        if not isinstance(spec, self.kind):
            raise InputError(
                f"register_{self.noun}({spec!r}): takes a {self.kind.__name__}, for example {self.example}")
        key, named = self.fold(spec.name), self.by_key()
        for name in (spec.name, *spec.aliases):
            other = named.get(self.fold(name))
            if other is not None and self.fold(other.name) != key:
                raise DuplicateRegistrationError(
                    f"register_{self.noun}({spec!r}): {name!r} already stands for {other!r}; give this {self.noun} "
                    "another name or alias")
        self._specs.add(key, spec, override)  # `by_key` has filled it
        return spec

    def scope(self) -> AbstractContextManager[None]:
        """Undo, at the end of the block, every registration made inside it."""
        return self._specs.scope()

    def __iter__(self) -> Iterator[S]:
        for key in self._specs:
            spec: Any = self._specs.find(key)
            yield spec

    def by_key(self) -> dict[str, S]:
        """Every spec by each of its names, as they are compared."""
        self._specs.fill()
        if self._named_version != self._specs.version:
            version = self._specs.version
            self._named = {self.fold(name): spec for spec in self for name in (*spec.aliases, spec.name)}
            self._named_version = version
        return self._named

    def list_near(self, name: str, most: int) -> str:
        """What an error says after an unknown ``name``: the nearest ones, and all that the catalogue holds."""
        named = self.by_key()
        close = dict.fromkeys(named[key].name for key in difflib.get_close_matches(self.fold(name), named, most, 0.5))
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return f"{hint}The catalogue holds {', '.join(spec.name for spec in self)}"
