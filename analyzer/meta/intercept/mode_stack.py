"""Private torch API: how dispatch modes are called, which of them are active, and code that runs without any; and what
torch's own fake tensors are.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


class DirectDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch calls as it is: others are wrapped in two calls that keep a compiler out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class without_modes:
    """A context in which neither function nor dispatch modes, nor autograd, see what runs."""

    __slots__ = ("_dispatch", "_function", "_grad_enabled")

    def __enter__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._dispatch: Any = torch._C._DisableTorchDispatch()  # for as long as the object lives
        self._function = torch._C.DisableTorchFunction()
        try:
            self._function.__enter__()
            torch._C._set_grad_enabled(False)
        except BaseException:  # an interrupt that came meanwhile
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        torch._C._set_grad_enabled(self._grad_enabled)
        self._function.__exit__(None, None, None)
        self._dispatch = None


@contextmanager
def modes_taken_off() -> Iterator[None]:
    """A block in which this thread has no modes, and may enter others."""
    functions = []
    with _disable_current_modes():
        try:
            while torch._C._len_torch_function_stack():
                functions.append(torch._C._pop_torch_function_stack())
            yield
        finally:
            for mode in reversed(functions):
                torch._C._push_on_torch_function_stack(mode)


def take_off_ignoring_modes() -> list[TorchDispatchMode]:
    """Take off the dispatch modes that see nothing of what a compiler traces, the innermost first: those of selective
    checkpoints are among them (``ignore_compile_internals`` in torch/utils/_python_dispatch.py).
    """
    taken: list[TorchDispatchMode] = []
    while (stack := _get_current_dispatch_mode_stack()) and getattr(
            stack[-1], "ignore_compile_internals", lambda: False)():
        taken.append(_pop_mode())
    return taken


def put_modes_back(taken: list[TorchDispatchMode]) -> None:
    while taken:
        _push_mode(taken.pop())


def is_active(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` sees what this thread runs; the engine's threads have the modes of who asked for backward."""
    return any(one is mode for one in _get_current_dispatch_mode_stack())


def find_context_device() -> torch.device | None:
    """The device of the innermost ``with torch.device(...)``, or of ``torch.set_default_device``, as it was given."""
    return next((mode.device for mode in reversed(_get_current_function_mode_stack())
                 if isinstance(mode, DeviceContext)), None)


def mode_stack_depths() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), len(_get_current_dispatch_mode_stack())


def cut_mode_stacks(functions: int, dispatches: int) -> None:
    """Take off what is above: modes that an exception kept from being left."""
    while torch._C._len_torch_function_stack() > functions:
        torch._C._pop_torch_function_stack()
    while len(_get_current_dispatch_mode_stack()) > dispatches:
        _pop_mode()


_OF_FAKE_TENSORS = re.compile(
    r"_?fake_device|fake_mode|constant|pytype|dispatch_keys|real_tensor|_\w+_memo(_vc|_epoch)?")


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What was set on a tensor; of a FakeTensor what its own class sets (``FakeTensor.__new__``) is left out."""
    if not isinstance(tensor, FakeTensor):
        return tensor.__dict__
    return {name: value for name, value in tensor.__dict__.items() if _OF_FAKE_TENSORS.fullmatch(name) is None}
