"""Dispatch modes of the program's own: torch calls them while it has taken the function mode off, or passes it by."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.meta.function.mode import answering
from analyzer.meta.source_line import first_frame, is_outside, is_user_code
from analyzer.meta.state import current

from .mode_stack import DirectDispatchMode, FakeTensorMode
from .replacement import Undo, made_once, replace

_entered: dict[int, list[Undo]] = {}  # by the id of a mode that is entered: what puts the handler of its class back


def program_mode_replacements() -> Iterator[Undo]:
    yield _put_back
    yield from _handlers()


@made_once
def _handlers() -> Iterator[Undo]:
    yield replace(TorchDispatchMode, "__enter__", _entering)
    yield replace(TorchDispatchMode, "__exit__", _leaving)
    yield replace(FakeTensorMode, "__enter__", _passing_by)
    yield replace(FakeTensorMode, "from_tensor", _standing_in)


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


def _asks_for_fake_tensors() -> bool:
    """Whether the program asks for torch's own tensors without data; those that torch makes for itself are its own."""
    if current() is None:
        return False
    frame = first_frame(lambda name: is_outside(name) and name != contextlib.__file__)
    return frame is not None and is_user_code(frame.f_code.co_filename)


def _passing_by(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors are without data as it is. Without CUDA, a fake tensor of torch's on it ends the process in backward."""
    def enter(mode: Any) -> Any:
        if not _asks_for_fake_tensors():
            return original(mode)
        state = current()
        assert state is not None
        state.assume(f"FakeTensorMode {state.where()}: is not entered, as no tensor has data here; the tensors made in "
                     "it are counted as if they were allocated, where in PyTorch they take no memory")
        mode.enter_stack.append((False, None, None))  # what torch's own __exit__ takes as nothing to leave
        return mode
    return enter


def _standing_in(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_tensor(mode: Any, tensor: Any, **options: Any) -> Any:
        if not _asks_for_fake_tensors():
            return original(mode, tensor, **options)
        found = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_(tensor.requires_grad)
    return from_tensor
