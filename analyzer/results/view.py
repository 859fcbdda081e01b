"""Where exporters, reports and other views of a profile are registered: `results` finds them without knowing them."""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from analyzer.errors import InputError
from analyzer.registry import Registry

View = Callable[..., Any]
F = TypeVar("F", bound=View)

_loaders: list[Callable[[], object]] = []
_lock = threading.RLock()


def load_on_first_use(load: Callable[[], object]) -> Callable[[], object]:
    """Call ``load``, which imports files that register views, before a view is looked for or added the first time."""
    _loaders.append(load)
    return load


def _load() -> None:
    with _lock:
        while _loaders:
            _loaders.pop()()


class ViewRegistry(Registry[str, View]):
    """Views by name. Those that come with the package are loaded before one is looked for, added or replaced.

    >>> @register_exporter("parameter_count")
    ... def count_parameters(profile):
    ...     return profile.params
    >>> from analyzer.results.profile import Profile
    >>> Profile(name="Net", mode="infer", params=3).export("parameter_count")
    3
    """

    def __call__(self, key: str, impl: View | None = None, *, override: bool = False) -> Any:
        """Register ``impl`` under the name ``key``, or return a decorator that does; refuses a name that is taken."""
        _load()
        return super().__call__(key, impl, override=override)

    def shipped(self, key: str) -> Callable[[F], F]:
        """A decorator for the views that come with the package, which are registered while they are loaded."""
        def register(impl: F) -> F:
            super(ViewRegistry, self).__call__(key, impl)
            return impl
        return register

    def __iter__(self) -> Iterator[str]:
        _load()
        return super().__iter__()

    def __contains__(self, key: str) -> bool:
        _load()
        return super().__contains__(key)

    def find(self, key: str) -> View | None:
        """The view of that name, or None."""
        _load()
        return super().find(key)

    def look_up(self, key: str, caller: str) -> View:
        """The view of that name. Raises InputError, with the names that there are, for another."""
        found = self.find(key) if isinstance(key, str) else None
        if found is None:
            raise InputError(f"{caller}({key!r}): must be one of {', '.join(map(repr, self))}")
        return found

    def takes(self, key: str, option: str) -> bool:
        """Whether the view of that name knows the keyword argument ``option``."""
        return option in (known := self.list_options(key)) or "**" in known

    def list_options(self, key: str) -> list[str]:
        """The names of a view's options, ``"**"`` where it takes any."""
        parameters = list(inspect.signature(self.look_up(key, self.name)).parameters.values())[1:]
        return ["**" if p.kind is inspect.Parameter.VAR_KEYWORD else p.name for p in parameters]

    def scope(self) -> AbstractContextManager[None]:
        """Undo, at the end of the block, every registration made inside it."""
        _load()
        return super().scope()


#: ``(profile, ...) -> anything``: what `Profile.export` and the ``to_*`` methods give.
register_exporter = ViewRegistry("register_exporter")
#: ``(profile, **options) -> str``: what `Profile.report` and ``--report`` of the command line print.
register_report = ViewRegistry("register_report")
#: What the other methods of the records of `analyzer.results` show, by name.
register_view = ViewRegistry("register_view")
