"""Failures of the model's own code, told with their place."""
from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from analyzer.errors import AnalyzerError
from analyzer.meta.source_line import is_outside, is_user_code
from analyzer.meta.structure import tensors_of


class ModelFailure(NamedTuple):
    """The innermost module whose call failed, the line of the model's own code, and what the module was given."""

    module_path: str | None  #: ``""`` is the model itself, None where no module ran
    module: str | None       #: its class, with what it is made of where it holds no others
    source: str | None       #: ``file.py:123``
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"in {self.module_path or 'the model itself'}, {self.module}" if self.module is not None else ""
        given = f"given {', '.join(self.given)}" if self.given else ""
        line = f"at {self.source}" if self.source is not None else ""
        return ", ".join([part for part in (place, given, line) if part])


def find_failure(error: BaseException) -> ModelFailure:
    """Where ``error``, which the model raised, came up.

    >>> try:
    ...     torch.nn.Sequential(torch.nn.Linear(4, 2))(torch.ones(2, 3))
    ... except RuntimeError as error:
    ...     print(find_failure(error)._replace(source=None))
    in 0, Linear(in_features=4, out_features=2, bias=True), given float32[2, 3]
    """
    source: str | None = None
    calls: list[tuple[torch.nn.Module, Any]] = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code, names = step.tb_frame.f_code, step.tb_frame.f_locals
        if is_user_code(code.co_filename):
            source = f"{code.co_filename}:{step.tb_lineno}"
        if code.co_name == "_call_impl" and isinstance(names.get("self"), torch.nn.Module):
            source = source if calls else None  # what called the model is not its code
            calls.append((names["self"], (names.get("args"), names.get("kwargs"))))
        step = step.tb_next
    if not calls:
        return ModelFailure(None, None, source)
    paths = {id(module): path for path, module in calls[0][0].named_modules()}
    # what forward makes anew has no path: the module that made it
    module, arguments = next((module, given) for module, given in reversed(calls) if id(module) in paths)
    given = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_of(arguments)]
    made_of = "" if next(module.children(), None) is not None else f"({module.extra_repr()})"
    return ModelFailure(paths[id(module)], type(module).__name__ + made_of, source, tuple(given[:4]))


def first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def describe_defect(error: BaseException) -> str | None:
    """What this package seems to have failed with, and where; None where the model, or PyTorch, did.

    >>> describe_defect(KeyError("raised nowhere")) is None
    True
    """
    whole = traceback.TracebackException.from_exception(error)
    if not is_own_defect(error, whole):
        return None
    place = f"{whole.stack[-1].filename}:{whole.stack[-1].lineno}"
    return f"a defect of analyzer, please report it: {first_line(error)}, at {place}"


def own_traceback(error: BaseException) -> str:
    """The traceback through the model's own code; all of it where this package seems to have failed."""
    whole = traceback.TracebackException.from_exception(error)
    if is_own_defect(error, whole):
        return "".join(whole.format())
    frames = list(whole.stack)
    called = next((i for i, frame in enumerate(frames) if frame.name == "_call_impl"), 0)
    own = [frame for frame in frames[called:] if is_user_code(frame.filename)]
    return "".join(["Traceback (most recent call last), of the model's own code:\n", *traceback.format_list(own),
                    f"{type(error).__name__}: {error}\n"]) if own else ""


def is_own_defect(error: BaseException, whole: traceback.TracebackException) -> bool:
    """Whether this package seems to have failed, by the traceback of the error."""
    return isinstance(error, _OF_A_DEFECT) and bool(whole.stack) and not is_outside(whole.stack[-1].filename)


@contextmanager
def noting_failures() -> Iterator[None]:
    """Note on what the model raises in the block in which module it came up (Python 3.11 and newer show notes)."""
    try:
        with telling_depth():
            yield
    except (AnalyzerError, RecursionError):
        raise
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        if hasattr(error, "add_note") and not any(note.startswith(_NOTE) for note in notes):
            error.add_note(f"{_NOTE} {find_failure(error)}")
        raise


@contextmanager
def telling_depth() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise RecursionError(
            f"{error}: Python allows {sys.getrecursionlimit():,} calls in each other, and a module that is profiled "
            "takes four, one more than by itself; where modules are nested so deep, raise it by sys.setrecursionlimit"
        ) from error


_NOTE = "analyzer: the model failed"
_OF_A_DEFECT = (AssertionError, AttributeError, IndexError, KeyError, NameError, RecursionError, TypeError)
