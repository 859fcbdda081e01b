"""Python modules that a TARGET names, by the path of their file or by their dotted name."""
from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from analyzer.errors import TargetError
from analyzer.record.model_failure import find_failure

from .model_target import find_close


def import_file(given: str, text: str) -> ModuleType:
    """Import the file ``given`` as ``python given`` would find what it imports: its folder is searched first; of a file
    in a package, the folder that holds the package.

    Raises TargetError where there is no such file, with the files that resemble it, or where importing it fails.
    """
    path = Path(given).absolute()
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise TargetError(f"{text}: no file {given!r} in {os.getcwd()}{find_close(path.name, beside)}")
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    with import_errors(given, text):
        importlib.invalidate_caches()  # the file may be younger than the last look into its folder
        if "." not in path.stem:
            module = sys.modules.get(name) or _import_if_found_at(name, path)
            if module is not None and _is_at(module, path):
                return module
        return _load(f"{name}@{path}", path)  # another module has its name


def _import_if_found_at(name: str, path: Path) -> ModuleType | None:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.exists(found.origin) or not path.samefile(found.origin):
        return None
    return importlib.import_module(name)


def _is_at(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.exists(file) and path.samefile(file)


def _load(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_name(name: str, text: str, hint: str) -> ModuleType:
    """Import a dotted name, searched for in the working directory first. TargetError, which ends in ``hint`` where
    there is no such module, or says why importing it fails.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script has its own directory there instead
    with import_errors(name, text):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                raise TargetError(f"{text}: no module {error.name!r} on the path or in {here}; {hint}") from error
            raise


@contextmanager
def import_errors(what: str, text: str) -> Iterator[None]:
    """Raise TargetError in place of whatever a user's module does while it is imported."""
    try:
        yield
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        raise TargetError(f"{text}: {what} itself imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:  # the latter: a script that reads its arguments when it is imported
        source = find_failure(error).source
        raise TargetError(f"{text}: importing {what} failed: {type(error).__name__}: {error}"
                          + (f", at {source}" if source else "")) from error
