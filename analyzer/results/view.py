"""Records whose fields are worked out when they are read, and the views of a profile that are registered."""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from analyzer.errors import InputError
from analyzer.on_use import load
from analyzer.registry import Form, Registry, check_name, signature_of

Groups = Mapping[Callable[[], Mapping[str, Any]], Sequence[str]]
"""Functions that work out fields of a record, with the names of these."""
_Record = TypeVar("_Record", bound="DeferredFields")


class DeferredFields:
    """A dataclass with slots, some of whose fields are worked out when first read; copies and pickles have all."""

    # each has its own lock: a forked child finds those of others' free; `_peak` is `Profile.find_peak_node`
    __slots__ = ("_groups", "_lock", "_peak", "_request")
    _groups: Groups

    @classmethod
    def deferred(cls: type[_Record], known: Mapping[str, Any], groups: Groups) -> _Record:
        """A record with ``known`` fields; those of each of ``groups`` are worked out when one of them is read."""
        record = cls(**known)
        for name in (name for names in groups.values() for name in names):
            object.__delattr__(record, name)
        record._defer(groups)
        return record

    def _defer(self, groups: Groups) -> None:
        self.complete(_groups=dict(groups), _lock=threading.RLock())

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:  # of a slot that is not set
            if not any(f.name == name for f in fields(self)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if hasattr(self, "_lock"):
                with self._lock:  # another thread may have worked it out meanwhile
                    for make in [make for make, names in self._groups.items() if name in names]:
                        self.complete(**make())
                        self.complete(_groups={m: n for m, n in self._groups.items() if m is not make})
            return object.__getattribute__(self, name)

    @property
    def request(self) -> dict[str, Any] | None:
        """The arguments that make such a record again, None where they are not known; copies and pickles have none."""
        return getattr(self, "_request", None)

    def remember(self: _Record, request: Mapping[str, Any]) -> _Record:
        """Keep the arguments that make such a record again."""
        self.complete(_request=dict(request))
        return self

    def complete(self, **known: Any) -> None:
        """Set fields that the function that made the record could not know, before others have it."""
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        self.complete(**{f.name: value for f, value in zip(fields(self), state)})  # type: ignore[arg-type]


View = Callable[..., Any]
F = TypeVar("F", bound=View)

_lock = threading.RLock()
_to_load = ["analyzer.report.shipped:load_reports"]


class ViewRegistry(Registry[str, View]):
    """Views by name. Those that come with the package are loaded before one is looked for, added or replaced."""

    def fill(self) -> None:
        """Import the files that register views, once."""
        with _lock:
            while _to_load:
                load(_to_load.pop())()

    def shipped(self, key: str) -> Callable[[F], F]:
        """A decorator for the views that come with the package, which are registered while they are loaded."""
        def register(impl: F) -> F:
            self.add(key, impl)
            return impl
        return register

    def look_up(self, key: str, caller: str) -> View:
        """The view of that name. Raises InputError, with the names that there are, for another."""
        found = self.find(key) if isinstance(key, str) else None
        if found is None:
            raise InputError(f"{caller}({key!r}): must be one of {', '.join(map(repr, self))}")
        return found

    def takes(self, key: str, option: str) -> bool:
        """Whether the view of that name knows the keyword argument ``option``."""
        known = _name_options(signature_of(self.look_up(key, self.name)))
        return option in known or "**" in known

    def call(self, caller: str, key: str, profile: Any, /, *args: Any, **options: Any) -> Any:
        """What the view makes of ``profile``. Raises InputError for options that it does not know, or lacks."""
        view = self.look_up(key, caller)
        signature = signature_of(view)
        known = _name_options(signature)
        said = f"its options are {', '.join(known) or 'none'}"
        for name in options:
            if name not in known and "**" not in known:
                raise InputError(f"{caller}({key!r}, {name}=...): {said}")
        if signature is not None:
            try:
                signature.bind(profile, *args, **options)
            except TypeError as error:
                raise InputError(f"{caller}({key!r}): {error}; {said}") from None
        return view(profile, *args, **options)


def _name_options(signature: inspect.Signature | None) -> list[str]:
    if signature is None:
        return ["**"]
    parameters = list(signature.parameters.values())[1:]  # the first is the profile
    return ["**" if p.kind is inspect.Parameter.VAR_KEYWORD else p.name for p in parameters]


#: ``(profile, **options) -> str``: what `Profile.report` and ``--report`` of the command line print.
register_report = ViewRegistry("register_report", check_name, Form("f(profile, **options)", 1))
#: ``(profile, ...) -> anything``: what `Profile.export` and ``--export`` give.
register_exporter = register_report.beside("register_exporter", call=Form("f(profile, ...)", 1))
