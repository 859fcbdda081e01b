"""Compiled functions run as they are written: a compiler that sees tensors without data ends the process."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current

_undo: list[Callable[[], None]] = []


def replacements() -> Iterator[Undo]:
    """Run compiled functions eagerly, also those that are compiled from now on; each result undoes one step."""
    if "torch._dynamo.eval_frame" in sys.modules:  # nothing was compiled before, where it is not there
        _run_eagerly()
    yield _put_back
    yield replace(torch, "compile", _compile)


def _run_eagerly() -> None:
    if not _undo:
        stance = torch.compiler.set_stance("force_eager")
        _undo.append(lambda: stance.__exit__(None, None, None))


def _put_back() -> None:
    while _undo:
        _undo.pop()()


def _compile(original: Any) -> Any:
    def compile(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if current() is not None:
            _run_eagerly()
        return result
    return compile
