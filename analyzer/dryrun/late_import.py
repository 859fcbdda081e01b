"""Replacements in modules that are not imported yet: made as soon as a script imports them."""
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from analyzer.meta.intercept.replacement import Undo

Make = Callable[[], Iterable[Undo]]


class _Finder:
    """Finds the modules asked for as others do, and lets their loaders make the replacements at the end."""

    def __init__(self, makers: Mapping[str, Make], undo: ExitStack) -> None:
        self._makers, self._undo = makers, undo
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if name not in self._makers or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self._make(name))  # type: ignore[assignment]
        return spec

    def _make(self, name: str) -> None:
        for undo in self._makers[name]():
            self._undo.callback(undo)


class _Loader:
    """A module's own loader, and what is done when it is through."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader, then the replacements."""
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@contextmanager
def replaced_once_imported(makers: Mapping[str, Make]) -> Iterator[None]:
    """For the length of a block, make the replacements of each module in ``makers``: now, or when it is imported."""
    with ExitStack() as undo:
        later = {name: make for name, make in makers.items() if name not in sys.modules}
        for name in makers.keys() - later.keys():
            for one in makers[name]():
                undo.callback(one)
        finder = _Finder(later, undo)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield
