"""Dispatch modes of the program's own: torch calls them while it has taken the function mode off, or passes it by."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.meta.function.mode import answering
from analyzer.meta.state import current

from .mode_stack import DirectDispatchMode
from .replacement import Undo, replace

_entered: dict[int, list[Undo]] = {}  # by the id of a mode that is entered: what puts the handler of its class back


def program_mode_replacements() -> Iterator[Undo]:
    yield _put_back
    yield replace(TorchDispatchMode, "__enter__", _entering)
    yield replace(TorchDispatchMode, "__exit__", _leaving)


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(mode: Any) -> Any:
        kind = type(mode)
        if current() is not None and not isinstance(mode, DirectDispatchMode) and not hasattr(mode, "_mode_key") and (
                isinstance(getattr_static(kind, "__torch_dispatch__"), FunctionType)):
            # of the class, by which higher-order operators find what they do under a mode
            _entered.setdefault(id(mode), []).append(replace(kind, "__torch_dispatch__", answering))
        return original(mode)
    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(mode: Any, *exc: Any) -> Any:
        if id(mode) in _entered:
            undo = _entered[id(mode)].pop()
            if not _entered[id(mode)]:
                del _entered[id(mode)]
            undo()
        return original(mode, *exc)
    return leave


def _put_back() -> None:
    """Of modes that were taken off without being left."""
    while _entered:
        for undo in _entered.popitem()[1]:
            undo()
