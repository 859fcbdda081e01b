"""Answers about a tensor: what it is, where it is, and its contents where they are known."""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from analyzer.meta.argument import own
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import CPU, MetaState
from analyzer.meta.storage import MetaStorage, find_storage
from analyzer.meta.tensor import MetaTensor, data_ptr, device_of, keep_class, use_on
from analyzer.meta.value.contents import read_known

from .handler import Handler, handles

Tensor = torch.Tensor


@handles(Tensor.tolist)
def _tolist(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    value = read_known(x)
    if value is not None:
        with without_modes():
            return value.tolist()
    if x.dim() == 0:
        return x.item()
    return [_tolist(state, func, (x[i],), kwargs) for i in range(x.shape[0])]


@handles(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where to split may be in a tensor on the host, which C++ reads."""
    x, *rest = args
    named = dict(kwargs)
    where = rest.pop(0) if rest else named.pop("tensor_indices_or_sections", None)
    if not isinstance(where, Tensor) or device_of(where).type != "cpu":
        return func(*args, **kwargs)
    where = _tolist(state, func, (where,), {})
    return func(x, where, *rest, **named)


def _known_number(x: Tensor) -> int | float | bool | complex | None:
    if x.layout is torch.strided and x.dim() == 0:
        storage = find_storage(x)
        if type(storage) is MetaStorage and (known := storage.exact) is not None:
            return known.number(x.dtype) if storage.nbytes() == x.itemsize else None
    return None


@handles(Tensor.item)
def _item(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A known number at once: optimizers ask for the step of each parameter."""
    number = _known_number(args[0])
    return func(*args, **kwargs) if number is None else number


@handles(Tensor.__bool__)
def _truth(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Likewise: layer drop asks in each layer."""
    number = _known_number(args[0])
    return func(*args, **kwargs) if number is None else bool(number)


@handles(Tensor.numpy, Tensor.__array__)
def _numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    value = read_known(x)
    if value is None:
        x.reshape(-1)[0].item()  # raises with the place and the way out, or notes what was taken
        value = None if state.repeats else read_known(x, assumed=True)
        # zeros in place of what the layers compute may lead to 0/0
        if value is None or not bool(value.isfinite().all()):
            with without_modes():
                value = torch.ones(x.shape, dtype=x.dtype, device=CPU)
    with without_modes():
        return value.numpy().copy()


@handles(Tensor.device.__get__)
def _device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = device_of(args[0])
    has_data = device.type == "cpu" and not isinstance(_storage_of(args[0]), MetaStorage)
    return state.adopted_device if has_data else device


@handles(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_lazy(args[0]):
        return func(*args, **kwargs)
    with without_modes():  # it has neither a shape nor elements, but a device and a dtype
        return keep_class(func(*args, **kwargs))


def _storage_of(x: Tensor) -> Any:
    return find_storage(x) if x.layout is torch.strided else None


def _is_type(kind: str) -> Handler:
    return lambda state, func, args, kwargs: _device(state, func, args, kwargs).type == kind


for _kind in ("cuda", "cpu", "meta"):
    handles(getattr(Tensor, f"is_{_kind}").__get__)(_is_type(_kind))


@handles(Tensor.get_device)
def _get_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    index = _device(state, func, args, kwargs).index
    return -1 if index is None else index


@handles(Tensor.__repr__)
def _repr(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        return MetaTensor.__repr__(x)
    with without_modes():
        return func(*args, **kwargs)  # type: ignore[no-any-return]


@handles(Tensor.__format__)
def _format(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As the number that a tensor of one is; where it must be known and is not, one without a format is its specs."""
    x, text = args[0], args[1] if len(args) > 1 else kwargs.get("format_spec", "")
    if x.dim() == 0 and (text or state.options.unknown_value == "placeholder" or _known_number(x) is not None):
        return format(x.detach().item(), text)
    return func(*args, **kwargs)  # type: ignore[no-any-return]


@handles(Tensor.__deepcopy__)
def _deepcopy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        return MetaTensor.__deepcopy__(x, args[1])
    return func(*args, **kwargs)


handles(Tensor.data_ptr)(lambda state, func, args, kwargs: data_ptr(args[0]))
handles(Tensor.pin_memory, Tensor.share_memory_)(lambda state, func, args, kwargs: args[0])
handles(Tensor.record_stream)(lambda state, func, args, kwargs: use_on(*args, **kwargs))
handles(Tensor.is_pinned)(lambda *args: False)
