"""Packages that a script asks for and that are not here: stand-ins that a dry run imports in their place."""
from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from analyzer.meta.state import current
from analyzer.on_use import load

_FLASH = "analyzer.tools.dryrun.flash_attn:MODULES"
#: Where the modules of each package are, and what each has; imported when a script asks for one.
_PACKAGES = {"vllm": "analyzer.tools.dryrun.vllm:MODULES", "sglang": "analyzer.tools.dryrun.sglang:MODULES",
             "flash_attn": _FLASH, "flash_attn_interface": _FLASH,
             "liger_kernel": "analyzer.tools.dryrun.liger:MODULES"}
_ALWAYS = ("vllm", "sglang")  # also where they are installed, since they would start; of others the real one runs

# Packages that look once, when they are imported, whether a stand-in's original is there. They are imported anew for a
# dry run, and those of an earlier one are kept for the next.
_ASKING = ("trl",)
_kept: dict[str, ModuleType] = {}


def check_dry_run(package: str, what: str = "this") -> None:
    """Raise RuntimeError where a stand-in is used outside of a dry run, as by what was imported in one."""
    if current() is None:
        raise RuntimeError(f"{package} is not installed: {what} is a stand-in, which works during a dry run")


class _PackageFinder:
    """Finds and makes the modules of the stand-ins for some packages."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = _list_modules(name)
        if name not in modules or name.partition(".")[0] not in self._packages:
            return None
        is_package = any(other.startswith(f"{name}.") for other in modules)
        loader: Any = self
        return ModuleSpec(name, loader, origin="a stand-in of the dry run", is_package=is_package)

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
    packages = [name for name in _PACKAGES if name in _ALWAYS or PathFinder.find_spec(name) is None]
    taken = _take(*packages, *_ASKING)
    finder = _PackageFinder(packages)
    try:
        sys.modules.update(_kept)
        sys.meta_path.insert(0, finder)
        yield
    finally:
        sys.meta_path[:] = [one for one in sys.meta_path if one is not finder]
        _take(*packages)
        _kept.clear()
        _kept.update(_take(*_ASKING))
        sys.modules.update(taken)


def _take(*packages: str) -> dict[str, ModuleType]:
    """The modules of packages, which are there no longer; a name with None, by which none is to be found, stays."""
    names = [name for name, module in list(sys.modules.items())
             if name.partition(".")[0] in packages and module is not None]
    return {name: sys.modules.pop(name) for name in names}
