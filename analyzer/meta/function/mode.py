"""The function half of the mode: it sees calls of torch before torch asks for a device that is not there."""
from __future__ import annotations

from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from analyzer.meta.opaque import call_opaque
from analyzer.meta.operator_info import register_shape_impl
from analyzer.meta.state import MetaState, active_state, indexed_device
from analyzer.meta.tensor import META, PLAIN_TENSORS

from . import answer, creation  # noqa: F401  # which fill the table
from .answer import handlers

Tensor = torch.Tensor


class MetaFunctionMode(TorchFunctionMode):
    """The function half of `MetaTensorMode`: it sees calls before torch asks for a device that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        state = self.state
        assert state is not None
        if type(func) is MethodWrapperType and state.tape is None and PLAIN_TENSORS.issuperset(
                types) and func not in handlers:
            return func(*args, **(kwargs or {}))  # an attribute is read or written
        call: Callable[..., Any] = call_function
        if types and not PLAIN_TENSORS.issuperset(
                types) and func not in handlers and torch._C._is_torch_function_enabled():
            call = next((self._calling(kind, types) for kind in types if _overrides(kind)), call_function)
        before, state.arguments = state.arguments, args
        try:
            if state.tape is not None:
                return state.tape.run(func, args, kwargs or {}, call)
            return call(func, args, kwargs or {})
        finally:
            state.arguments = before

    def _calling(self, kind: Any, types: Any) -> Callable[..., Any]:
        """What calls a function of a tensor class that overrides functions (nested tensors) with the mode in force."""
        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self:
                return kind.__torch_function__(func, types, args, kwargs)
        return call


def _overrides(kind: type) -> bool:
    return kind is not Tensor and kind is not torch.nn.Parameter and getattr(
        kind, "__torch_function__", None) is not torch._C._disabled_torch_function_impl


def call_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as the simulated device would."""
    state = active_state()
    handler = handlers.get(func)
    if handler is not None:
        return handler(state, func, args, kwargs)
    if kwargs.get("device") is not None:
        return _call_on(state, func, args, kwargs, kwargs["device"])
    if func in _device_constructors():
        default = torch.get_default_device()
        if default.type != "cpu":
            return _call_on(state, func, args, kwargs, default)
        return func(*args, **kwargs)
    if func in register_shape_impl:
        return call_opaque(func, args, kwargs)
    return func(*args, **kwargs)



def _call_on(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> Any:
    return state.call_on(indexed_device(device), func, *args, **{**kwargs, "device": META})
