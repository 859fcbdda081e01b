"""Tensors made of data that the code gives: their contents are known."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.argument import own
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import CPU, MetaState, indexed_device
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import device_of, new_tensor
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Deferred, small_enough

from .handler import handles
from .move import move

Tensor = torch.Tensor


def constant(state: MetaState, value: Tensor, device: torch.device) -> Tensor:
    """A new tensor whose contents are those of ``value``, a tensor with data that has no other user."""
    with without_modes():
        out, storage = new_tensor(value.size(), value.stride(), value.dtype, device, state.space)
        scalar = (value.dtype, repr(value.item())) if value.dim() == 0 else None
    if scalar is not None:  # one for all of that value: what follows from it need be worked out only once
        storage.known = state.scalars.get(scalar) or state.scalars.setdefault(scalar, Deferred(value))
    elif small_enough(value.numel(), value.dtype) and value.untyped_storage().nbytes() == storage.nbytes():
        storage.known = Deferred(value)
    return out


def _with_values(tree: Any) -> Any:
    """Nested data with the mode's own tensors replaced by their values."""
    if isinstance(tree, Tensor) and isinstance(tree.untyped_storage(), MetaStorage):
        value = read_known(tree)
        return tree.item() if value is None and tree.numel() == 1 else tree if value is None else value
    if isinstance(tree, (list, tuple)):
        return [_with_values(x) for x in tree]
    return tree


@handles(torch.tensor, torch.as_tensor, torch.asarray)
def make_tensor(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.tensor(data)``: the contents are known."""
    kwargs = dict(kwargs)
    data = args[0] if args else kwargs.pop("data", kwargs.pop("obj", None))
    device = kwargs.pop("device", None)
    requires_grad = kwargs.pop("requires_grad", False)
    kwargs.pop("pin_memory", None)
    if isinstance(data, Tensor):
        copies = func is torch.tensor
        x = own(state, data.detach().clone() if copies else data)
        out = move(state, x, None if device is None else indexed_device(device), kwargs.get("dtype"),
                   not copies and bool(kwargs.get("copy")))
        return out.requires_grad_() if requires_grad else out
    data = _with_values(data)
    with without_modes():
        value = func(data, *args[1:], **kwargs, device=CPU)
    out = constant(state, value, indexed_device(torch.get_default_device() if device is None else device))
    return out.requires_grad_() if requires_grad else out


@handles(Tensor.new_tensor)
def _new_tensor(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    named = dict(kwargs)
    data = args[1] if len(args) > 1 else named.pop("data")
    named["dtype"] = named.get("dtype") or like.dtype
    named["device"] = device_of(like) if named.get("device") is None else named["device"]
    return make_tensor(state, torch.tensor, (data,), named)


@handles(torch.from_numpy)
def _from_numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_modes():
        value = func(*args, **kwargs)
    return constant(state, value, CPU)


@handles(torch.device)
def _make_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device(0)`` is the accelerator's first."""
    return torch.device("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)
