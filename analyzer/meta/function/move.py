"""Moves between devices and dtypes: ``Tensor.to``, ``cuda``, ``cpu``, ``type``."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.argument import own
from analyzer.meta.state import CPU, MetaState, active_state, current, indexed_device
from analyzer.meta.tensor import META, device_of, is_around_tensors

from .handler import handles

Tensor = torch.Tensor


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None, bool, Any]:
    """(device, dtype, copy, memory_format) of the three forms of ``Tensor.to``."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    rest = list(args)
    if "other" in kwargs:
        rest.insert(0, kwargs["other"])
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = device_of(other), other.dtype
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0) or dtype
    copy = kwargs.get("copy", rest[1] if len(rest) > 1 else False)
    return device, dtype, bool(copy), kwargs.get("memory_format")


@handles(Tensor.to)
def _to(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    device, dtype, copy, memory_format = _parse_to(args[1:], kwargs)
    return move(state, own(state, x), None if device is None else indexed_device(device), dtype, copy, memory_format)


def move(state: MetaState, x: Tensor, device: torch.device | None, dtype: torch.dtype | None = None, copy: bool = False,
         memory_format: Any = None) -> Tensor:
    """``x.to(device, dtype)``: ``x`` itself where nothing changes."""
    named = {} if memory_format is None else {"memory_format": memory_format}
    if is_around_tensors(x):
        return _move_parts(x, device, dtype, copy)
    if device is None or device == device_of(x):
        return Tensor.to(x, dtype=dtype or x.dtype, copy=copy, **named)
    if x.requires_grad and torch.is_grad_enabled():
        return MoveDevice.apply(x, device, dtype, memory_format)  # type: ignore[no-any-return]
    return _copy_to(state, x, device, dtype, memory_format)


def _move_parts(x: Tensor, device: torch.device | None, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """A tensor around tensors knows how its parts are moved."""
    device, dtype = device or device_of(x), dtype or x.dtype
    if not copy and (device, dtype) == (device_of(x), x.dtype):
        return x
    return torch.ops.aten._to_copy.default(x, device=device, dtype=dtype)  # type: ignore[no-any-return]


def _copy_to(state: MetaState, x: Tensor, device: torch.device, dtype: torch.dtype | None,
             memory_format: Any = None) -> Tensor:
    named = {"memory_format": torch.preserve_format if memory_format is None else memory_format}
    copied: Tensor = state.call_on(device, torch.ops.aten._to_copy.default, x, dtype=dtype, **named)
    return copied


class MoveDevice(torch.autograd.Function):
    """A copy between devices; its gradient is copied back (both are on meta, where autograd would see no move)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, dtype: torch.dtype | None, memory_format: Any) -> Tensor:
        """Copy to the other device."""
        ctx.back = (device_of(x), x.dtype)
        return _copy_to(active_state(), x, device, dtype, memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Copy the gradient back."""
        state = current()
        if state is None:  # backward after the mode ended
            return grads[0].to(ctx.back[1]), None, None, None
        return _copy_to(state, grads[0], *ctx.back), None, None, None


@handles(torch._C._nn._parse_to)
def _parse_module_to(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of ``Module.to``: a device that is named is looked at, nothing is made on it; a number is that of
    an accelerator. A tensor that is named is where it is simulated to be.
    """
    like = args[0] if args else kwargs.get("tensor")
    if isinstance(like, Tensor):
        return (device_of(own(state, like)), *func(*args, **kwargs)[1:])
    args, kwargs = tuple([_device_of_number(a) for a in args]), {k: _device_of_number(a) for k, a in kwargs.items()}
    return func(*args, **kwargs)


def _device_of_number(given: Any) -> Any:
    return indexed_device(given) if isinstance(given, int) and not isinstance(given, bool) else given


@handles(Tensor.cuda)
def _cuda(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return move(state, own(state, args[0]), indexed_device("cuda" if device is None else device),
                memory_format=kwargs.get("memory_format"))


@handles(Tensor.cpu)
def _cpu(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return move(state, own(state, args[0]), CPU, memory_format=kwargs.get("memory_format"))


@handles(Tensor.type)
def _type(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    target = args[1] if len(args) > 1 else kwargs.get("dtype")
    device = device_of(x)
    if target is None:
        name = str(Tensor.type(torch.empty(0, dtype=x.dtype, device=META))).replace("torch.", "").replace("meta.", "")
        return f"torch.{name}" if device.type == "cpu" else f"torch.{device.type}.{name}"
    if isinstance(target, torch.dtype):
        return move(state, x, None, target)
    text = target if isinstance(target, str) else f"{target.__module__}.{target.__name__}"
    dtype = _LEGACY_TYPES.get(text.rpartition(".")[2])
    if dtype is None:
        return func(*args, **kwargs)
    return move(state, x, indexed_device("cuda" if ".cuda." in text else "cpu"), dtype)

_LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool}
