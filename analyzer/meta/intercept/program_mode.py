"""Dispatch modes of the program's own: torch calls them while it has taken the function mode off, or passes it by."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.meta.function.mode import answering
from analyzer.meta.state import current

from .mode_stack import DirectDispatchMode
from .replacement import Undo, replace

_entered: dict[int, tuple[type, int]] = {}  # by the id of a mode: its own class, and how often it was entered


def program_mode_replacements() -> Iterator[Undo]:
    yield replace(TorchDispatchMode, "__enter__", _entering)
    yield replace(TorchDispatchMode, "__exit__", _leaving)


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(mode: Any) -> Any:
        if id(mode) in _entered:
            kind, times = _entered[id(mode)]
            _entered[id(mode)] = kind, times + 1
        elif current() is not None and not isinstance(mode, DirectDispatchMode) and not hasattr(mode, "_mode_key"):
            _entered[id(mode)] = type(mode), 1
            mode.__class__ = _class_that_asks(type(mode))
        return original(mode)
    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(mode: Any, *exc: Any) -> Any:
        if id(mode) in _entered:
            kind, times = _entered.pop(id(mode))
            if times > 1:
                _entered[id(mode)] = kind, times - 1
            else:
                mode.__class__ = kind
        return original(mode, *exc)
    return leave


def _class_that_asks(kind: Any) -> type:
    """A class like ``kind`` whose handler is told the devices that fake tensors are on."""
    def handle(mode: Any, *args: Any, **kwargs: Any) -> Any:
        return answering(kind.__torch_dispatch__)(mode, *args, **kwargs)

    return type(kind.__name__, (kind,), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__torch_dispatch__": handle,
        "_should_skip_dynamo": classmethod(lambda cls: False)})  # torch would wrap the handler once more
