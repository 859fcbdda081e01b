"""The TARGET of the command line: which model it stands for, and where that is found."""
from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from analyzer.errors import AnalyzerError, ModelError, TargetError, find_close
from analyzer.fx.module_wrapper import exported_module, ignore_flags
from analyzer.on_use import load
from analyzer.record.failure import find_failure, first_line

from .input_spec import LabelRule, Target, parse_input
from .shipped import MODELS

# what torch says of floating indices, classes and tokens
_WANTS_INTEGERS = re.compile(r"\b(long|int64|longtensor|integer)\b", re.IGNORECASE)
_WANTED = "give a callable of no arguments that returns an nn.Module"


def find_factory(module: ModuleType, where: str, name: str, text: str) -> Target:
    """The target that is ``name`` in ``module``, or ``where``. Raises TargetError with the names that would do."""
    factory: Any = module
    for part in name.split("."):
        if not hasattr(factory, part):
            public = [name for name, value in vars(factory).items() if callable(value) and not name.startswith("_")]
            raise TargetError(f"{text}: {where} has no {name!r}{find_close(part, public)}"
                              f"{describe_factories(module, where)}")
        factory = getattr(factory, part)
    if (program := exported_module(factory)) is not factory:
        return Target(text, lambda: program)
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = "a model already built" if isinstance(factory, nn.Module) else f"of type {type(factory).__name__}"
        raise TargetError(f"{text}: {name} is {kind}; {_WANTED}{describe_factories(module, where)}")
    if needed := _list_required_parameters(factory):
        raise TargetError(f"{text}: {name} needs {', '.join(needed)}; {_WANTED}{describe_factories(module, where)}")

    def build() -> nn.Module:
        model = ignore_flags(exported_module(factory()))
        if not isinstance(model, nn.Module):
            raise TargetError(f"{text}: {name}() returned a value of type {type(model).__name__}, not an nn.Module")
        return model

    return Target(text, build)


def describe_factories(module: ModuleType, where: str) -> str:
    names = list_factories(module)
    return f"; {where} has these: {', '.join(names)}" if names else f"; {where} has none"


def list_factories(module: ModuleType) -> list[str]:
    """Names of the module's own model classes, then of functions and partials, that need no arguments."""
    classes, others = [], []
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        is_own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, type):
            if is_own and issubclass(value, nn.Module) and not _list_required_parameters(value):
                classes.append(name)
            continue
        if isinstance(value, functools.partial):
            may_return = not isinstance(value.func, type) or issubclass(value.func, nn.Module)
        else:
            said = value.__annotations__.get("return", nn.Module) if inspect.isfunction(value) and is_own else None
            may_return = issubclass(said, nn.Module) if isinstance(said, type) else said not in (None, "None")
        if may_return and not _list_required_parameters(value):
            others.append(name)
    return classes + others


def _list_required_parameters(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtins have no signature; the call will tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def import_file(given: str, text: str) -> ModuleType:
    """Import a file as ``python given`` would find what it imports: its folder, or that of its package, is searched
    first. Raises TargetError where there is no such file, with the files that resemble it, or where importing it fails.
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
            module = sys.modules.get(name)
            found = importlib.util.find_spec(name) if module is None else None
            if found is not None and _is_file(found.origin, path):
                module = importlib.import_module(name)
            if module is not None and _is_file(getattr(module, "__file__", None), path):
                return module
        name = f"{name}@{path}"  # another module has its name
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


def _is_file(given: str | None, path: Path) -> bool:
    return given is not None and os.path.exists(given) and path.samefile(given)


def import_name(name: str, text: str, hint: str) -> ModuleType:
    """Import a dotted name, the working directory first. TargetError says why it fails, or ends in ``hint``."""
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


def _detection_ops() -> AbstractContextManager[None]:
    """A block in which detection models run without data, where torchvision is imported already."""
    if "torchvision" not in sys.modules:
        return nullcontext()
    from .torchvision_ops import detection_ops

    return detection_ops()


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Raise ModelError in place of what is no error of this package, e.g. for a sequence that the model cannot take."""
    try:
        with _detection_ops():
            yield
    except AnalyzerError:
        raise
    except (Exception, SystemExit) as error:  # the latter: a factory that ends where it finds no data
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # this frame is not the model's
        place, given = str(find_failure(error)), find_failure(error).given[-1:]
        if _WANTS_INTEGERS.search(first_line(error)) and given and given[0].startswith("float"):
            sizes = given[0].partition("[")[2].rstrip("]").replace(", ", "x")
            place = f"{place}\n  integers are written --input NAME=int64:{sizes}; a SHAPE alone is of float32"
        raise ModelError(f"{name} failed: {first_line(error)}\n  {place}") from error


# The TARGET of the command line: which model to profile, in the forms of docs/usage.md.
# No weights are ever loaded.

__all__ = ["LabelRule", "Target", "load_target"]

FORMS = "torchvision:NAME, timm:NAME, hf:CONFIG.json, hf:ConfigClass, package.module:factory"
FILE = "FILE.py:factory"
LIBRARIES = {"torchvision": "vision_models:find_torchvision_model", "timm": "vision_models:find_timm_model",
             "hf": "transformers_models:find_transformers_model"}


def load_target(text: str) -> Target:
    """Find the model that `text` names; nothing is built until its `build()` is called. Raises TargetError if it names
    none (with the names that resemble it), MissingExtraError if the library that it comes from is not installed.

    >>> [str(spec) for spec in load_target("vit_b_16").choose_inputs(train=True)]
    ['float32:8x3x224x224']
    """
    scheme, colon, rest = text.partition(":")
    path, _, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if path.endswith(".py") and scheme not in LIBRARIES:
        module = import_file(path, text)
        if not name:
            raise TargetError(f"{text}: name a class or function of the file, as in {path}:Net"
                              f"{describe_factories(module, path)}")
        return find_factory(module, path, name, text)
    if not colon:
        return _find_shipped_model(text)
    if not rest:
        raise TargetError(f"{text}: nothing follows the colon; TARGET is one of {', '.join(MODELS)}, {FILE}, {FORMS}")
    if scheme in LIBRARIES:
        return _find_in_library(scheme, rest, text)
    hint = f"TARGET is one of {FORMS}, {FILE}{find_close(scheme, LIBRARIES)}"
    if not all(part.isidentifier() for part in scheme.split(".")):
        raise TargetError(f"{text}: {scheme!r} is no module name; {hint}")
    return find_factory(import_name(scheme, text, hint), scheme, rest, text)


def _find_in_library(library: str, name: str, text: str) -> Target:
    found: Target = load(f"analyzer.zoo.{LIBRARIES[library]}")(name, text)
    return found


def import_own_code(text: str) -> None:
    """Import the user's own file or module that ``text`` names, if any, for what it registers. Raises TargetError."""
    scheme, colon, _ = text.partition(":")
    if scheme not in LIBRARIES and (colon or text.endswith(".py")):
        load_target(text)


def _find_shipped_model(name: str) -> Target:
    if name not in MODELS:
        from .published_shape import find_shape

        hint = f"; did you mean hf:{name}?" if find_shape(name) is not None else find_close(name, MODELS)
        with suppress(AnalyzerError):  # torchvision is not installed, or has none either
            hint = f"; did you mean {_find_in_library('torchvision', name, f'torchvision:{name}').name}?"
        raise TargetError(f"{name}: no model of that name ships with analyzer{hint or ';'} TARGET is one of "
                          f"{', '.join(MODELS)}, {FILE}, {FORMS}")
    shipped = MODELS[name]
    spec = parse_input(shipped.input)
    labels = (LabelRule("labels", spec.name),) if shipped.labelled and spec.name else ()
    return Target(name, shipped.factory, (spec,), labels)
