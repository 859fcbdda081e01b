"""Torch functions under the mode: device arguments become claims, data leaves only where it is known."""
from __future__ import annotations

from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from analyzer.meta.argument import own
from analyzer.meta.current_device import claimed_device
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.tensor import attach
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Deferred, small_enough

from .opaque import call_opaque
from .reserved_touch import ReservedTouch
from .shape_registry import register_shape_impl
from .state import CPU, MetaState, current
from .storage import MetaStorage, find_storage
from .tensor import META, MetaTensor, claim_of, data_ptr, keep_claim

Tensor = torch.Tensor
Handler = Callable[[MetaState, Any, tuple[Any, ...], dict[str, Any]], Any]


class MetaFunctionMode(TorchFunctionMode):
    """The function half of `MetaTensorMode`: it sees calls before torch asks for a device that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        state = self.state
        assert state is not None
        if state.reserved and args and id(args[0]) in state.reserved and func not in _SAME_FOR_RESERVED:
            raise ReservedTouch(state.reserved[id(args[0])])
        if type(func) is MethodWrapperType and state.tape is None and _PLAIN_KINDS.issuperset(
                types) and func not in _HANDLERS:
            return func(*args, **(kwargs or {}))  # an attribute is read or written
        call: Callable[..., Any] = call_function
        if types and not _PLAIN_KINDS.issuperset(
                types) and func not in _HANDLERS and torch._C._is_torch_function_enabled():
            call = next((self._calling(kind, types) for kind in types if _overrides(kind)), call_function)
        if state.tape is not None:
            return state.tape.run(func, args, kwargs or {}, call)
        return call(func, args, kwargs or {})

    def _calling(self, kind: Any, types: Any) -> Callable[..., Any]:
        """Calls a function of a tensor class that overrides functions (nested tensors), with the mode in force inside."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self:
                return kind.__torch_function__(func, types, args, kwargs)

        return call


_PLAIN_KINDS = frozenset({Tensor, torch.nn.Parameter, MetaTensor})  # override no function


def _overrides(kind: type) -> bool:
    return kind is not Tensor and kind is not torch.nn.Parameter and getattr(
        kind, "__torch_function__", None) is not torch._C._disabled_torch_function_impl


def call_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as the claimed device would."""
    state = current()
    assert state is not None
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(state, func, args, kwargs)
    if kwargs.get("device") is not None:
        return _call_on(state, func, args, kwargs, kwargs["device"])
    if func in _factories():
        default = torch.get_default_device()
        if default.type != "cpu":
            return _call_on(state, func, args, kwargs, default)
        return func(*args, **kwargs)
    if func in register_shape_impl:
        return call_opaque(func, args, kwargs)
    return func(*args, **kwargs)


_constructors: set[Any] = set()


def _factories() -> set[Any]:
    if not _constructors:
        _constructors.update(_device_constructors())
    return _constructors


def _call_on(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> Any:
    before, state.pending_claim = state.pending_claim, claimed_device(device)
    try:
        return func(*args, **{**kwargs, "device": META})
    finally:
        state.pending_claim = before


def constant(state: MetaState, value: Tensor, claim: torch.device) -> Tensor:
    """A new tensor whose contents are those of ``value``, a tensor with data that nobody else holds."""
    with torch._C.DisableTorchFunction():
        guard = torch._C._DisableTorchDispatch()
        try:
            out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
            scalar = (value.dtype, repr(value.item())) if value.dim() == 0 else None
        finally:
            del guard
    storage = attach(out, claim, state.space)
    if scalar is not None:  # one for all of that value: what follows from it need be worked out only once
        storage.known = state.scalars.get(scalar) or state.scalars.setdefault(scalar, Deferred(value))
    elif small_enough(value.numel(), value.dtype) and value.untyped_storage().nbytes() == storage.nbytes():
        storage.known = Deferred(value)
    out.__class__ = MetaTensor
    return out


def _without_claims(tree: Any) -> Any:
    """Nested data with the mode's own tensors replaced by their values."""
    if isinstance(tree, Tensor) and isinstance(tree.untyped_storage(), MetaStorage):
        value = read_known(tree)
        return tree.item() if value is None and tree.numel() == 1 else tree if value is None else value
    if isinstance(tree, (list, tuple)):
        return [_without_claims(x) for x in tree]
    return tree


def _tensor(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    data = args[0] if args else kwargs.pop("data", kwargs.pop("obj", None))
    device = kwargs.pop("device", None)
    requires_grad = kwargs.pop("requires_grad", False)
    kwargs.pop("pin_memory", None)
    if isinstance(data, Tensor):
        if func is torch.tensor:
            out = data.detach().clone()
            out = _to(state, Tensor.to, (out,), {"device": device, "dtype": kwargs.get("dtype")})
        else:
            out = _to(state, Tensor.to, (data, ),
                      {"device": device, "dtype": kwargs.get("dtype"), "copy": bool(kwargs.get("copy"))})
        return out.requires_grad_() if requires_grad else out
    guard = torch._C._DisableTorchDispatch()
    try:
        value = func(_without_claims(data), *args[1:], **{k: v for k, v in kwargs.items()}, device=CPU)
    finally:
        del guard
    if device is None:
        device = torch.get_default_device()
    out = constant(state, value, claimed_device(device))
    return out.requires_grad_() if requires_grad else out


def _new_tensor(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    named = dict(kwargs)
    data = args[1] if len(args) > 1 else named.pop("data")
    named["dtype"] = named.get("dtype") or like.dtype
    named["device"] = claim_of(like) if named.get("device") is None else named["device"]
    return _tensor(state, torch.tensor, (data,), named)


def _from_numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guard = torch._C._DisableTorchDispatch()
    try:
        value = func(*args, **kwargs)
    finally:
        del guard
    return constant(state, value, CPU)


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None, bool, Any]:
    """(device, dtype, copy, memory_format) of the three forms of ``Tensor.to``."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    rest = list(args)
    if "other" in kwargs:
        rest.insert(0, kwargs["other"])
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = claim_of(other), other.dtype
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0) or dtype
    copy = kwargs.get("copy", rest[1] if len(rest) > 1 else False)
    return device, dtype, bool(copy), kwargs.get("memory_format")


def _to(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    device, dtype, copy, memory_format = _parse_to(args[1:], kwargs)
    return move(state, own(state, x), None if device is None else claimed_device(device), dtype, copy, memory_format)


def move(state: MetaState, x: Tensor, claim: torch.device | None, dtype: torch.dtype | None = None, copy: bool = False,
         memory_format: Any = None) -> Tensor:
    """``x.to(claim, dtype)``: ``x`` itself where nothing changes."""
    named = {} if memory_format is None else {"memory_format": memory_format}
    if claim is None or claim == claim_of(x):
        return Tensor.to(x, dtype=dtype or x.dtype, copy=copy, **named)
    if x.requires_grad and torch.is_grad_enabled():
        return MoveDevice.apply(x, claim, dtype, memory_format)  # type: ignore[no-any-return]
    return _copy_to(state, x, claim, dtype, memory_format)


def _copy_to(state: MetaState, x: Tensor, claim: torch.device, dtype: torch.dtype | None,
             memory_format: Any = None) -> Tensor:
    before, state.pending_claim = state.pending_claim, claim
    try:
        named = {"memory_format": torch.preserve_format if memory_format is None else memory_format}
        return torch.ops.aten._to_copy.default(x, dtype=dtype, **named)  # type: ignore[no-any-return]
    finally:
        state.pending_claim = before


class MoveDevice(torch.autograd.Function):
    """A copy between devices; its gradient is copied back (both really live on meta, where autograd would see no move)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, claim: torch.device, dtype: torch.dtype | None, memory_format: Any) -> Tensor:
        ctx.back = (claim_of(x), x.dtype)
        state = current()
        assert state is not None
        return _copy_to(state, x, claim, dtype, memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        state = current()
        if state is None:  # backward after the mode ended
            return grads[0].to(ctx.back[1]), None, None, None
        return _copy_to(state, grads[0], *ctx.back), None, None, None


def _cuda(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return move(state, own(state, args[0]), claimed_device("cuda" if device is None else device),
                memory_format=kwargs.get("memory_format"))


def _cpu(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return move(state, own(state, args[0]), CPU, memory_format=kwargs.get("memory_format"))


def _type(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    target = args[1] if len(args) > 1 else kwargs.get("dtype")
    claim = claim_of(x)
    if target is None:
        name = str(Tensor.type(torch.empty(0, dtype=x.dtype, device=META))).replace("torch.", "").replace("meta.", "")
        return f"torch.{name}" if claim.type == "cpu" else f"torch.{claim.type}.{name}"
    if isinstance(target, torch.dtype):
        return move(state, x, None, target)
    text = target if isinstance(target, str) else f"{target.__module__}.{target.__name__}"
    dtype = _LEGACY_TYPES.get(text.rpartition(".")[2])
    if dtype is None:
        return func(*args, **kwargs)
    return move(state, x, claimed_device("cuda" if ".cuda." in text else "cpu"), dtype)


_LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool
}


def _unchanged(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _tolist(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    value = read_known(x)
    if value is not None:
        with without_modes():
            return value.tolist()
    if x.dim() == 0:
        return x.item()
    return [_tolist(state, func, (x[i],), kwargs) for i in range(x.shape[0])]


def _tensor_split(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where to split may be in a tensor on the host, which C++ reads."""
    x, *rest = args
    named = dict(kwargs)
    where = rest.pop(0) if rest else named.pop("tensor_indices_or_sections", None)
    if not isinstance(where, Tensor) or claim_of(where).type != "cpu":
        return func(*args, **kwargs)
    where = _tolist(state, func, (where,), {})
    return func(x, where, *rest, **named)


def _known_number(x: Tensor) -> int | float | bool | complex | None:
    if x.layout is torch.strided and x.dim() == 0:
        storage = find_storage(x)
        if type(storage) is MetaStorage and storage.known is not None and not storage.known.assumed and storage.nbytes(
        ) == x.itemsize:
            return storage.known.number(x.dtype)
    return None


def _item(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A known number at once: optimizers ask for the step of each parameter."""
    number = _known_number(args[0])
    return func(*args, **kwargs) if number is None else number


def _truth(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Likewise: layer drop asks in each layer."""
    number = _known_number(args[0])
    return func(*args, **kwargs) if number is None else bool(number)


def _numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    value = read_known(x)
    if value is None:
        x.reshape(-1)[0].item()  # raises with the place and the way out, or notes what was taken
        value = None if state.repeats else read_known(x, assumed=True)
        # zeros in place of what the layers compute may lead to 0/0
        if value is None or not bool(value.isfinite().all()):
            value = _ones_like(x)
    with without_modes():
        return value.numpy().copy()


def _ones_like(x: Tensor) -> Tensor:
    guard = torch._C._DisableTorchDispatch()
    try:
        return torch.ones(x.shape, dtype=x.dtype, device=CPU)
    finally:
        del guard


def _device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    claim = claim_of(args[0])
    return state.adopted_claim if id(args[0]) in state.reserved or claim.type == "cpu" and not isinstance(
        _storage_of(args[0]), MetaStorage) else claim


def _index(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[[0, 2]]``: C++ would make a tensor of the list where ``x`` really lives, and its contents would be lost."""
    x, index = args[0], args[1]
    if type(index) is list and not all(type(i) in (int, bool) for i in index):
        index = tuple(index)  # as treatSequenceAsTuple in torch/csrc/autograd/python_variable_indexing.cpp
    if type(index) in _SEQUENCES or type(index) is tuple and any(type(i) in (*_SEQUENCES, tuple) for i in index):
        claim = claim_of(x)
        made = _index_tensor(state, index, claim) if type(index) is not tuple else tuple(
            _index_tensor(state, i, claim) for i in index)
        args = (x, made, *args[2:])
    return func(*args, **kwargs)


_SEQUENCES = (list, numpy.ndarray)


def _index_tensor(state: MetaState, index: Any, claim: torch.device) -> Any:
    if isinstance(index, numpy.ndarray):
        return _tensor(state, torch.tensor, (index,), {"device": claim}) if index.dtype.kind in "iub" else index
    if type(index) not in (list, tuple) or not index:
        return index
    if _holds_numbers(index):
        return _tensor(state, torch.tensor, (index,), {"device": claim})
    if all(type(i) is int or isinstance(i, Tensor) and i.dim() == 0 for i in index):
        return torch.stack(
            [i if isinstance(i, Tensor) else _tensor(state, torch.tensor, (i, ), {"device": claim}) for i in index])
    return index


def _holds_numbers(values: Any) -> bool:
    return all(type(v) in (int, bool) or type(v) in (list, tuple) and _holds_numbers(v) for v in values)


def _data(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_lazy(args[0]):
        return func(*args, **kwargs)
    with without_modes():  # it has neither a shape nor elements, but a device and a dtype
        return keep_claim(func(*args, **kwargs))


def _make_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device(0)`` is the accelerator's first."""
    return torch.device("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)


def _storage_of(x: Tensor) -> Any:
    return find_storage(x) if x.layout is torch.strided else None


def _is_type(kind: str) -> Handler:
    return lambda state, func, args, kwargs: _device(state, func, args, kwargs).type == kind


def _get_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    index = _device(state, func, args, kwargs).index
    return -1 if index is None else index


def _data_ptr(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return data_ptr(args[0])


def _repr(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        return MetaTensor.__repr__(x)
    guard = torch._C._DisableTorchDispatch()
    try:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    finally:
        del guard


def _deepcopy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        return MetaTensor.__deepcopy__(x, args[1])
    return func(*args, **kwargs)


# What a tensor without a stand-in answers as its stand-in would.
_SAME_FOR_RESERVED = frozenset({
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.get_device,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex
})

_HANDLERS: dict[Any, Handler] = {
    torch.device: _make_device,
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.type: _type,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    Tensor.new_tensor: _new_tensor,
    torch.from_numpy: _from_numpy,
    Tensor.pin_memory: _unchanged,
    Tensor.share_memory_: _unchanged,
    Tensor.record_stream: lambda *a: None,
    Tensor.item: _item,
    Tensor.__bool__: _truth,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.device.__get__: _device,
    Tensor.is_cuda.__get__: _is_type("cuda"),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _is_type("cpu"),  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: _is_type("meta"),  # type: ignore[attr-defined]
    Tensor.get_device: _get_device,
    Tensor.is_pinned: lambda *a: False,
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _index,
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
    Tensor.data_ptr: _data_ptr,
    Tensor.__repr__: _repr,
    Tensor.__deepcopy__: _deepcopy,
}
