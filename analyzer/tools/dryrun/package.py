"""Packages that a script asks for and that are not here: stand-ins that a dry run imports in their place."""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from analyzer.on_use import load

#: Where the modules of each package are, and what each has; imported when a script asks for one.
_PACKAGES = {"vllm": "analyzer.tools.dryrun.vllm:MODULES"}

# Packages that look once, when they are imported, whether a stand-in's original is there. They are imported anew for a
# dry run, and those of an earlier one are kept for the next.
_ASKING = ("trl",)
_kept: dict[str, ModuleType] = {}


class _Finder:
    """Finds and makes the modules of stand-ins."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = _list_modules(name)
        if name not in modules:
            return None
        is_package = any(other.startswith(f"{name}.") for other in modules)
        return ModuleSpec(name, self, origin="a stand-in of the dry run", is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = f"{module.__name__}, a stand-in of the dry run"  # an import of what it lacks says so
        vars(module).update(_list_modules(module.__name__)[module.__name__])


def _list_modules(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Those of the package that a module would be of; empty where it has no stand-in."""
    place = _PACKAGES.get(name.partition(".")[0])
    found: Mapping[str, Mapping[str, Any]] = {} if place is None else load(place)
    return found


@contextmanager
def stand_in_packages() -> Iterator[None]:
    """A block in which the stand-ins are imported; after it ``sys.modules`` has of them, and of the packages that ask
    for them, what it had.
    """
    taken = _take(*_PACKAGES, *_ASKING)
    finder = _Finder()
    try:
        sys.modules.update(_kept)
        sys.meta_path.insert(0, finder)
        yield
    finally:
        sys.meta_path[:] = [one for one in sys.meta_path if one is not finder]
        _take(*_PACKAGES)
        _kept.clear()
        _kept.update(_take(*_ASKING))
        sys.modules.update(taken)


def _take(*packages: str) -> dict[str, ModuleType]:
    """The modules of packages, which are there no longer."""
    names = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}
