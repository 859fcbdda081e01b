"""Arguments of a call taken by the mode, of collectives too."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from analyzer.errors import InputError

from .address_space import AddressSpace, MetaStorage, find_storage, new_storage
from .intercept.mode_stack import FakeTensor, without_modes
from .spec import SPARSE_LAYOUTS, parts_of, strided_of
from .state import CPU, MetaOptions, MetaState, current, indexed_device, place_among
from .structure import host_tensors, replace_tensors, tensors_of
from .tensor import (
    PLAIN_TENSORS,
    MetaTensor,
    count_on,
    device_of,
    is_around_tensors,
    meta_storage_of,
    sparse_like,
    take_class,
    tensor_on,
)
from .value.known_value import Deferred, small_enough

#: In a world of ranks the `distributed.collective.Collectives`.
impl: Any = None
#: By tensor class that calls the same operator again on its parts: who answers before, else returns NotImplemented.
redispatching: dict[type, Callable[..., Any]] = {}


@contextmanager
def simulating(collectives: Any) -> Iterator[None]:
    global impl
    before, impl = impl, collectives
    try:
        yield
    finally:
        impl = before


Tensor = torch.Tensor
FakeStorages = dict[int, tuple[torch.UntypedStorage, Callable[[], torch.UntypedStorage | None]]]
"""Storages with data and what gives those in their places, as long as they live, by the address of the first."""


def fake_arguments(state: MetaState, tree: Any, device: torch.device) -> Any:
    """``tree`` with tensors on ``device``, or each on its own one of several; shared storages and views are as before,
    and small ones keep their values.
    """
    storages: FakeStorages = {}
    made: dict[int, Tensor] = {}
    check_tensors(tree)
    with without_modes():  # no function of this one that calls itself: the cycle would keep the arguments alive
        for tensor in host_tensors(tree):
            _fake(state, tensor, CPU, storages, made)
        return replace_tensors(tree, lambda value: _fake(
            state, value, place_among(state, device_of(value), device), storages, made))


def _fake(state: MetaState, value: Tensor, device: torch.device, storages: FakeStorages,
          made: dict[int, Tensor]) -> Tensor:
    if id(value) not in made:
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            parts = {name: _fake(state, getattr(value, name), device, storages, made) for name in names}
            out = type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())
            out = out.requires_grad_(value.requires_grad) if value.layout is torch.strided else out
        elif value.layout is torch.strided:
            base = value._base if value.is_leaf else None
            if base is None or base.requires_grad or base.dtype is not value.dtype or base.layout is not torch.strided:
                out = _on_fake_storage(state, value, device, storages)
            else:  # a view of such a base too: autocast keeps no cast of a view, and what is written has a gradient
                base = _fake(state, base, device, storages, made)
                with torch.enable_grad():  # autograd refuses writes to views that were made without
                    out = torch.as_strided(base, value.size(), value.stride(), value.storage_offset())
                take_class(out)
            out = keep_subclass(value, out).requires_grad_(value.requires_grad)
        else:
            out = _sparse(state, value, device, storages).requires_grad_(value.requires_grad)
        made[id(value)] = out
    return made[id(value)]


def check_tensors(tree: Any) -> None:
    """Raise InputError for a tensor that cannot be without its data."""
    for value in tensors_of(tree):
        if type(value) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(value):
            continue
        if isinstance(value, FakeTensor) and not any(isinstance(size, torch.SymInt) for size in value.shape):
            continue
        if value.is_nested:
            what, way = "nested tensor in the strided layout", "make it with layout=torch.jagged"
        elif value.is_quantized:
            what, way = f"{value.dtype} tensor", "pass it dequantized, and quantize it inside of the model"
        elif isinstance(value, FakeTensor):
            what, way = (f"FakeTensor of shape {tuple(value.shape)}, in which sizes are symbols",
                         "make it from numbers, in a FakeTensorMode without shape_env")
        elif dispatches(type(value)):
            what, way = (f"{type(value).__name__}, which dispatches operators itself and has no __tensor_flatten__",
                         "pass the tensors that it is made of, and make it inside of the model")
        elif value.layout is not torch.strided and value.layout not in SPARSE_LAYOUTS:
            what, way = f"{value.layout} tensor of shape {tuple(value.shape)}", "pass a dense one (`to_dense()`)"
        else:
            continue
        raise InputError(f"an argument is a {what}, which cannot be taken without its data. Way out: {way}.")


def dispatches(kind: type[Tensor]) -> bool:
    """Whether a class of tensors answers operators itself, so that another tensor cannot be made one of it."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def keep_subclass(original: Tensor, fake: Tensor) -> Tensor:
    """``fake`` with the class and the attributes of ``original``, where that class has functions of its own."""
    kind = type(original)
    if kind in PLAIN_TENSORS or isinstance(original, torch.nn.Parameter) or dispatches(kind) or (
            kind.__torch_function__ is torch._C._disabled_torch_function_impl):
        return fake
    with torch._C.DisableTorchFunction():
        out = fake.as_subclass(kind)
    vars(out).update(vars(original))
    return out


def _on_fake_storage(state: MetaState, tensor: Tensor, device: torch.device, storages: FakeStorages) -> Tensor:
    real = tensor.untyped_storage()
    found = storages.get(real._cdata)
    storage = None if found is None else found[1]()
    if storage is None:
        storage = made = new_storage(real.nbytes(), device, state.space)
        if isinstance(real, MetaStorage):
            storage.followed = real.followed
        elif real.device.type != "meta" and small_enough(real.nbytes() // tensor.itemsize, tensor.dtype):
            storage.known = Deferred(tensor.detach())
        storages[real._cdata] = (real, lambda: made)
    return count_on(tensor_on(storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()), tensor)


def _sparse(state: MetaState, tensor: Tensor, device: torch.device, storages: FakeStorages) -> Tensor:
    return sparse_like(tensor, [_on_fake_storage(state, part, device, storages) for part in parts_of(tensor)])


def adopt(state: MetaState, tensor: Tensor, device: torch.device | None = None, is_new: bool = False) -> Tensor:
    """A fake tensor for one with data, which is not read; one that ``is_new`` is met nowhere else."""
    is_met = device is None and device_of(tensor).type == "cpu"
    if device is None:
        device = device_of(tensor)
        device = state.adopted_device if device.type in ("cpu", "meta") else device
    make = _sparse if tensor.layout in SPARSE_LAYOUTS else _on_fake_storage
    with without_modes():  # function handlers ask while the modes are active
        known, space = len(state.fakes), state.space
        if state.tracing is not None:
            state.space = state.tracing.outside_space  # a constant of a compiled function is there before its graph
        try:
            out = make(state, tensor, device, {} if is_new else state.fakes)
        finally:
            state.space = space
        if len(state.fakes) > known and state.recorder is not None:
            for part in parts_of(out) if tensor.layout in SPARSE_LAYOUTS else [out]:
                state.recorder.memory.adopted(part.untyped_storage())
    if is_met:
        tell_met(state, out)
    return out


def tell_met(state: MetaState, tensor: Tensor) -> None:
    """Say of a fake tensor that stands for one with data which no `.to()` of the model moves."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    if isinstance(storage, MetaStorage):
        state.meets_data = storage.is_met = True


def own(state: MetaState, tensor: Tensor) -> Tensor:
    if tensor.layout not in SPARSE_LAYOUTS and (tensor.layout is not torch.strided or is_around_tensors(tensor)):
        return tensor
    return tensor if isinstance(find_storage(strided_of(tensor)), MetaStorage) else adopt(state, tensor)


def adopt_arguments(state: MetaState, tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return own(state, tree)
    if isinstance(tree, dict):
        return {k: adopt_arguments(state, v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(adopt_arguments(state, x) for x in tree)
    return tree


def _construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``MetaTensor(tensor, device=None)``: a leaf like ``tensor``, which is not read, on ``device`` or where it is.

    Under a mode it takes what else ``torch.Tensor`` takes, because ``type(x)(2, 3)`` may be a program's.
    """
    device = kwargs.get("device")
    like = args[0] if len(args) == 1 and kwargs.keys() <= {"device"} and isinstance(args[0], Tensor) else None
    if cls is not MetaTensor or like is not None and device is None and meta_storage_of(like) is not None:
        return Tensor.__new__(cls, *args, **kwargs)
    if like is not None:
        return _like(like, device)
    if current() is None:
        said = ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
        raise InputError(f"MetaTensor({said}): outside of `with MetaTensorMode():` it is made of a tensor. "
                         "Way out: MetaTensor(torch.empty(2, 3)), or torch.empty(2, 3) under the mode.")
    return torch.Tensor(*args, **kwargs)


def _like(tensor: Tensor, device: Any) -> Tensor:
    check_tensors(tensor)
    state = current() or MetaState(MetaOptions(), AddressSpace(), CPU)
    place = None if device is None else indexed_device(device)
    if is_around_tensors(tensor):
        return fake_arguments(state, tensor, place or device_of(tensor))  # type: ignore[no-any-return]
    out = adopt(state, tensor, place, is_new=place is not None)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(out, tensor.requires_grad)
    return out.requires_grad_(tensor.requires_grad)


MetaTensor.__new__ = _construct  # type: ignore[method-assign]
