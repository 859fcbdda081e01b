"""What functions of torch do under the mode instead: the table of handlers, answers about a tensor, and moves."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import Parameter, is_lazy
from torch.utils.dlpack import DLDeviceType

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.argument import adopt_arguments, own
from analyzer.meta.copied_tensor import deepcopy_tensor
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import SPARSE_LAYOUTS
from analyzer.meta.state import CPU, MetaState, active_state, current, indexed_device, mode_in_force, never_pinned
from analyzer.meta.tensor import META, MetaTensor, data_ptr, device_of, is_around_tensors, keep_class, with_node
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Deferred

Handler = Callable[[MetaState, Any, tuple[Any, ...], dict[str, Any]], Any]
handlers: dict[Any, Handler] = {}
"""By function: what is called with the state, the function, its positional and its named arguments."""


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(functions, handler))
        return handler
    return add


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
    if is_around_tensors(x):  # which knows how its parts are moved
        device, dtype = device or device_of(x), dtype or x.dtype
        if not copy and (device, dtype) == (device_of(x), x.dtype):
            return x
        return torch.ops.aten._to_copy.default(x, device=device, dtype=dtype)  # type: ignore[no-any-return]
    if device is None or device == device_of(x):
        return Tensor.to(x, dtype=dtype or x.dtype, copy=copy, **named)
    if x.requires_grad and torch.is_grad_enabled():
        return MoveDevice.apply(x, device, dtype, memory_format)  # type: ignore[no-any-return]
    return _copy_to(state, x, device, dtype, memory_format)


def _copy_to(state: MetaState, x: Tensor, device: torch.device, dtype: torch.dtype | None,
             memory_format: Any = None) -> Tensor:
    named = {"memory_format": torch.preserve_format if memory_format is None else memory_format}
    copied: Tensor = state.call_on(device, torch.ops.aten._to_copy.default, x, dtype=dtype, **named)
    return copied


@with_node("ToCopyBackward0")
class MoveDevice(torch.autograd.Function):
    """A copy between devices; its gradient is copied back (both are on meta, where autograd would see no move)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, dtype: torch.dtype | None, memory_format: Any) -> Tensor:
        ctx.back = (device_of(x), x.dtype)
        return _copy_to(active_state(), x, device, dtype, memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        state = current()
        if state is None:  # backward after the mode ended
            return grads[0].to(ctx.back[1]), None, None, None
        return _copy_to(state, grads[0], *ctx.back), None, None, None


@handles(torch._C._nn._parse_to)
def _parse_module_to(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of ``Module.to``: a number is that of an accelerator, a tensor is where it is simulated to be."""
    like = args[0] if args else kwargs.get("tensor")
    if isinstance(like, Tensor):
        return (device_of(own(state, like)), *func(*args, **kwargs)[1:])
    return func(*[indexed_device(a) if type(a) is int else a for a in args],
                **{k: indexed_device(a) if type(a) is int else a for k, a in kwargs.items()})


@handles(Tensor.cuda)
def _cuda(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return move(state, own(state, args[0]), indexed_device("cuda" if device is None else device),
                memory_format=kwargs.get("memory_format"))


@handles(Tensor.cpu)
def _cpu(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return move(state, own(state, args[0]), CPU, memory_format=kwargs.get("memory_format"))


@handles(Tensor.type_as)
def _type_as(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
    return move(state, own(state, x), device_of(other), other.dtype)


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
    return func(x, _tolist(state, func, (where,), {}), *rest, **named)


def _known_number(x: Tensor) -> int | float | bool | complex | None:
    if x.layout is torch.strided and x.dim() == 0:
        storage = find_storage(x)
        if type(storage) is MetaStorage and (known := storage.exact) is not None:
            return known.number(x.dtype) if storage.nbytes() == x.itemsize else None
    return None


@handles(Tensor.item, Tensor.__bool__)
def _number(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A known number at once: optimizers ask for the step of each parameter, layer drop asks in each layer."""
    number = _known_number(args[0])
    if number is None:
        return func(*args, **kwargs)
    if state.graph is not None:
        state.graph.asked(func)
    return number if func is Tensor.item else bool(number)


def _refuse_array(x: Tensor, forced: bool) -> None:
    """Raise for what has no array: torch/csrc/utils/tensor_numpy.cpp, tensor_to_numpy."""
    storage, device = _storage_of(x), device_of(x)
    if forced:
        return
    # data that was met on the way is assumed to be on the device, and may be on the host
    if device.type != "cpu" and not (isinstance(storage, MetaStorage) and storage.is_met):
        raise TypeError(f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                        "host memory first.")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


@handles(Tensor.numpy, Tensor.__array__)
def _numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = own(state, args[0])
    _refuse_array(x, forced=func is Tensor.numpy and bool(kwargs.get("force")))
    value = read_known(x)
    if value is None:
        x.reshape(-1)[0].item()  # raises with the place and the way out, or notes what was taken
        value = None if state.repeats else read_known(x, assumed=True)
        # zeros in place of what the layers compute may lead to 0/0
        if value is None or not bool(value.isfinite().all()):
            with without_modes():
                value = torch.ones(x.shape, dtype=x.dtype, device=CPU)
    with without_modes():
        array = value.numpy().copy()
        storage = _storage_of(x)
        # they share memory: what is written to the array, such as a file that is read into it, is the tensor's
        if isinstance(storage, MetaStorage) and storage.known is None and storage.device == CPU and (
                not x.is_floating_point() and x.is_contiguous() and x.nbytes == storage.nbytes()):
            storage.known = Deferred(torch.from_numpy(array))
        return array


@handles(Tensor.device.__get__)
def _device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_lazy(args[0]):  # which refuses questions of its storage
        with torch._C.DisableTorchFunction():
            return _place(state, args[0])
    return _place(state, args[0])


def _place(state: MetaState, tensor: Tensor) -> torch.device:
    device = device_of(tensor)
    has_data = device.type == "cpu" and not isinstance(_storage_of(tensor), MetaStorage)
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


@handles(Tensor.__repr__)
def _repr(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As PyTorch's where a few integers are known: they may be a part of a name."""
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        value = None if x.is_floating_point() or x.is_complex() or x.numel() > _MOST_PRINTED else read_known(x)
        return _write_specs(x) if value is None else _write_known(value, device_of(x))
    with without_modes():
        return func(*args, **kwargs)  # type: ignore[no-any-return]

_write_specs = MetaTensor.__repr__
_MOST_PRINTED = 1000  # more are summarized: torch/_tensor_str.py, PRINT_OPTS.threshold


def _write_known(value: Tensor, device: torch.device) -> str:
    with without_modes():
        text = repr(value.detach())
    if device.type == "cpu":
        return text
    before, dtype, after = text.removesuffix(")").partition(", dtype=")
    return f"{before}, device='{device}'{dtype}{after})"


@handles(Tensor.__format__)
def _format(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As the number that a tensor of one is, but for parameters. An index is often a part of a name, so it must be
    known; of a floating number that is not, which is only printed, the text without a format is that of its specs.
    """
    x, text = args[0], args[1] if len(args) > 1 else kwargs.get("format_spec", "")
    is_number = x.dim() == 0 and not isinstance(x, Parameter)
    is_index = not (x.is_floating_point() or x.is_complex())
    if is_number and (text or is_index or state.options.unknown_value == "placeholder"
                      or read_known(own(state, x)) is not None):
        return format(x.detach().item(), text)
    if text:
        return func(*args, **kwargs)  # type: ignore[no-any-return]  # which raises
    return _repr(state, Tensor.__repr__, (x,), {})  # type: ignore[no-any-return]


@handles(Tensor.__deepcopy__)
def _deepcopy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fake tensor, of one with data too: torch would make it by ``new_empty`` or ``clone``, and refuse its class."""
    x = args[0]
    if isinstance(_storage_of(x), MetaStorage):
        return deepcopy_tensor(*args, **kwargs)
    is_dense = x.layout is torch.strided and not x.is_quantized
    if type(x) is not Tensor or not (is_dense or x.layout in SPARSE_LAYOUTS) or device_of(x).type != "cpu":
        return func(*args, **kwargs)
    with mode_in_force():  # for its gradient and attributes
        return deepcopy_tensor(x, args[1] if len(args) > 1 else kwargs["memo"], own(state, x))


@handles(Tensor.get_device)
def _get_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    index = _device(state, func, args, kwargs).index
    return -1 if index is None else index


@handles(Tensor.__dlpack_device__)
def _dlpack_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = _device(state, args[0], args, kwargs)
    kind = {"cpu": DLDeviceType.kDLCPU, "cuda": DLDeviceType.kDLCUDA}.get(device.type)
    return func(*args, **kwargs) if kind is None else (kind, device.index or 0)


handles(Tensor.data_ptr)(lambda state, func, args, kwargs: data_ptr(args[0]))
@handles(torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile, torch.linalg.matrix_rank,
         torch.linalg.multi_dot)
def _with_fake_arguments(state: MetaState, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions of which C++ compares the devices of all arguments before it calls an operator: none may have data."""
    return func(*adopt_arguments(state, args), **adopt_arguments(state, kwargs))


@handles(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
         torch.conv_transpose3d)
def _convolve(state: MetaState, func: Any, args: Any, kwargs: Any) -> Any:
    """The same of complex tensors, which C++ takes apart (``complex_convolution`` in Convolution.cpp)."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    is_complex = isinstance(weight, Tensor) and weight.dtype.is_complex
    return (_with_fake_arguments if is_complex else _call)(state, func, args, kwargs)


def _call(state: MetaState, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


handles(Tensor.share_memory_)(lambda state, func, args, kwargs: args[0])


@handles(Tensor.pin_memory)
def _pin(state: MetaState, func: Any, args: Any, kwargs: Any) -> Any:
    """``aten/src/ATen/native/Memory.cpp``, _pin_memory: refused but for memory of the host."""
    if device_of(args[0]).type != "cpu":
        raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")
    never_pinned(state)
    return args[0]
handles(Tensor.is_pinned)(lambda *args: False)


@handles(Tensor.is_set_to)
def _is_set_to(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """aten/src/ATen/native/Memory.cpp, is_set_to: whether both are the same view of one storage."""
    x, other = own(state, args[0]), own(state, args[1] if len(args) > 1 else kwargs["tensor"])
    views = [(t.storage_offset(), tuple(t.shape), t.stride()) for t in (x, other)]
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata and views[0] == views[1]
