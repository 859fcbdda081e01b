"""The function half of the mode, with what it answers where tensors are made and indexed, and of registered shapes."""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import MethodWrapperType
from typing import Any

import numpy
import torch
from torch._ops import OpOverload
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.argument import adopt_arguments, own
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.operator_info import hold_before, hold_blocks, kernel_memory, register_shape_impl, registered_need
from analyzer.meta.spec import Signature, TensorSpec, spec_of, to_specs
from analyzer.meta.state import CPU, MetaState, active, active_state, indexed_device, never_pinned
from analyzer.meta.tensor import META, PLAIN_TENSORS, MetaTensor, device_of, kernel, new_tensor, take_class
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Deferred, small_enough

from .answer import handlers, handles, move

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
        if type(func) is MethodWrapperType and state.tape is None and state.tracing is None and (
                PLAIN_TENSORS.issuperset(types) and func not in handlers):
            return func(*args, **(kwargs or {}))  # an attribute is read or written
        call: Callable[..., Any] = call_function
        if types and not PLAIN_TENSORS.issuperset(
                types) and func not in handlers and torch._C._is_torch_function_enabled():
            kind = next(filter(_overrides, types), None)
            call = call_function if kind is None else partial(self._call_class, kind, types)
        before, state.arguments = state.arguments, args
        try:
            if state.tape is not None:
                return state.tape.run(func, args, kwargs or {}, call)
            if state.tracing is not None:
                return state.tracing.dispatch(func, args, kwargs or {}, call)
            return call(func, args, kwargs or {})
        finally:
            state.arguments = before

    def _call_class(self, kind: Any, types: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            return kind.__torch_function__(func, types, args, kwargs)


class _Answering(TorchFunctionMode):
    """Answers what C++ calls back while a torch function or an operator runs, for which torch takes `MetaFunctionMode`
    off or passes it by. What is called there is a part of that function: no tape takes notes of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        with torch._C.DisableTorchFunction():
            if device is not None and torch.device(device).type == "meta" or (  # as an operator is given it
                    type(func) is MethodWrapperType and not isinstance(args[0], MetaTensor)):
                return func(*args, **kwargs)
            if isinstance(func, OpOverload) and sys._getframe(1).f_code is OpOverload.decompose.__code__:
                # a mode such as FlopCounterMode asks for its parts: called as it is, it would come to that mode again
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            return call_function(func, args, kwargs)


def answering(callback: Any) -> Any:
    """``callback``, where there is one, which asks the mode where torch has taken it off."""
    if callback is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = active.function_mode
        if mode is None or torch._C._is_torch_function_enabled() and mode in _get_current_function_mode_stack():
            return callback(*args, **kwargs)
        with torch._C._EnableTorchFunction(), _Answering():
            return callback(*args, **kwargs)
    return call


@handles(torch.unravel_index)
def _unravel_index(state: MetaState, func: Any, args: Any, kwargs: Any) -> Any:
    """Written in Python, it makes a tensor by ``torch.tensor``, which C++ would put where no device is."""
    return answering(torch.functional._unravel_index)(*args, **kwargs).unbind(-1)


def _overrides(kind: type) -> bool:
    return kind is not Tensor and kind is not torch.nn.Parameter and getattr(
        kind, "__torch_function__", None) is not torch._C._disabled_torch_function_impl


def call_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = handlers.get(func)
    if handler is not None:
        if args and isinstance(args[0], UninitializedTensorMixin):  # whose class lets few functions see what it is
            with torch._C.DisableTorchFunctionSubclass():
                return handler(active_state(), func, (args[0].as_subclass(Tensor), *args[1:]), kwargs)
        return handler(active_state(), func, args, kwargs)
    device = kwargs.get("device")
    if device is None and func in _device_constructors():
        device = torch.get_default_device()
        device = None if device.type == "cpu" else device
    # what a dispatch mode of the program's, such as a selective checkpoint's, passes on names where tensors really are
    if device is not None and not (isinstance(func, torch._ops.OpOverload) and torch.device(device).type == "meta"):
        return active_state().call_on(indexed_device(device), func, *args, **{**kwargs, "device": META})
    if func in register_shape_impl:
        return call_opaque(func, args, kwargs)
    return func(*args, **kwargs)


def call_opaque(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a registered shape as an operator: it saves its tensor inputs and gives gradients to its floating ones."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "Autograd"):
        return func(*args, **kwargs)  # its own formula knows better; the dispatcher finds the shape
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    return Opaque.apply(func, args, kwargs, *tensors)


class Opaque(torch.autograd.Function):
    """The autograd node of an operator whose inside is unknown."""

    @staticmethod
    def forward(ctx: Any, func: Any, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        result, signature = _run_shape(func, args, kwargs, tensors)
        need = registered_need(signature) if any(ctx.needs_input_grad) else None
        extra = []  # what it keeps for backward besides its inputs and outputs
        if need is not None and need.saved_bytes:
            first = result if isinstance(result, Tensor) else result[0]
            # without a device, which would be one of the model's choice
            extra.append(first.new_empty(need.saved_bytes, dtype=torch.uint8))
        ctx.save_for_backward(*tensors, *extra)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *(
            torch.empty_like(x) if needed and (x.is_floating_point() or x.is_complex()) else None
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[3:]))


def _run_shape(func: Any, args: Any, kwargs: Any, tensors: tuple[Tensor, ...]) -> tuple[Any, Signature]:
    """The outputs of the registered shape, placed and recorded as one call, and its signature."""
    state = active_state()
    impl = register_shape_impl.find(func) or register_shape_impl.find(getattr(func, "overloadpacket", None))
    assert impl is not None
    args, kwargs, tensors = (adopt_arguments(state, tree) for tree in (args, kwargs, tensors))  # those with data
    storages: list[Any] = [t.untyped_storage() for t in tensors]
    device = next((s.device for s in storages if s.device.type != "cpu"), torch.device("cpu"))
    with kernel, without_modes():
        result = impl(*args, **kwargs)
    single = isinstance(result, Tensor)
    outputs = [result] if single else list(result)
    specs = tuple(TensorSpec.of(tuple(o.shape), o.stride(), o.dtype, str(device)) for o in outputs)
    signature = Signature(func, to_specs(args), to_specs(kwargs), tuple(map(spec_of, tensors)), specs)
    stages, order = kernel_memory(signature)
    kept: list[MetaStorage] = []
    for position, i in enumerate(order or range(len(outputs))):
        if not isinstance(outputs[i].untyped_storage(), MetaStorage):
            with without_modes():  # they would take the making of a block for an operator
                hold_before(state, stages, position, device, kept)
            state.space.attach(outputs[i], device)
        take_class(outputs[i])
    for stage in stages:
        if stage.before is None:
            hold_blocks(state, device, stage.blocks, stage.elsewhere)
    kept.clear()
    if state.recorder is not None:
        born = [s for o in outputs if isinstance(s := o.untyped_storage(), MetaStorage)]
        state.recorder.calls.called(signature, storages, born)
    return result if single else tuple(outputs), signature


def constant(state: MetaState, value: Tensor, device: torch.device) -> Tensor:
    with without_modes():
        out, storage = new_tensor(value.size(), value.stride(), value.dtype, device, state.space)
        scalar = (value.dtype, repr(value.item())) if value.dim() == 0 else None
    if scalar is not None:  # one for all of that value: what follows from it need be worked out only once
        storage.known = state.scalars.get(scalar) or state.scalars.setdefault(scalar, Deferred(value))
    elif small_enough(value.numel(), value.dtype) and value.untyped_storage().nbytes() == storage.nbytes():
        storage.known = Deferred(value)
    return out


def _with_values(tree: Any) -> Any:
    if isinstance(tree, Tensor) and isinstance(tree.untyped_storage(), MetaStorage):
        value = read_known(tree)
        return tree.item() if value is None and tree.numel() == 1 else tree if value is None else value
    if isinstance(tree, (list, tuple)):
        return [_with_values(x) for x in tree]
    return tree


@handles(torch.tensor, torch.as_tensor, torch.asarray)
def make_tensor(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    data = args[0] if args else kwargs.pop("data", kwargs.pop("obj", None))
    device = kwargs.pop("device", None)
    requires_grad = kwargs.pop("requires_grad", False)
    if kwargs.pop("pin_memory", None):
        never_pinned(state)
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


@handles(Tensor.new)
def _new(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The legacy constructor, by which SparseAdam makes sparse tensors; C++ knows no type of those on meta."""
    if args[0].layout is torch.sparse_coo and len(args) == 4:
        return torch.sparse_coo_tensor(*args[1:], check_invariants=False)
    if len(args) == 2 and not isinstance(args[1], (int, torch.Size, Tensor, torch.UntypedStorage)):
        return _new_tensor(state, func, args, kwargs)
    return func(*args, **kwargs)


@handles(torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_compressed_tensor)
def _make_sparse(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices and values go to the device that is asked for: torch/csrc/utils/tensor_new.cpp."""
    device = kwargs.pop("device", None)
    if device is not None:
        place = indexed_device(torch.device(device))
        args, kwargs = tree_map_only(torch.Tensor, lambda t: move(state, t, place), (args, kwargs))
    return func(*args, **kwargs)


@handles(torch.from_numpy, torch.from_file)
def _from_numpy(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_modes():
        value = func(*args, **kwargs)
    return constant(state, value, CPU)


@handles(torch.device)
def _make_device(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device(0)`` is the accelerator's first."""
    return torch.device("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)


@handles(Tensor.__getitem__)
def _read(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0], _with_tensors(state, args[0], args[1]), **kwargs)


@handles(Tensor.__setitem__)
def _write(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``x[0] = 1.0``: on CPU and CUDA C++ fills a part with a number, or with a tensor of no dimensions on the host
    (`THPVariable_setitem` in torch/csrc/autograd/python_variable_indexing.cpp, `copy_to` in ATen/TensorIndexing.h).
    """
    x, index, value = args
    if type(x) not in PLAIN_TENSORS or not _is_basic(index) or device_of(x).type not in ("cpu", "cuda"):
        func(x, _with_tensors(state, x, index), value, **kwargs)
        return
    if isinstance(value, (bool, int, float, complex)):
        value = torch.scalar_tensor(value, dtype=x.dtype, device=CPU)
    if type(value) not in PLAIN_TENSORS or value.dim() or device_of(value).type != "cpu":
        func(x, index, value, **kwargs)
        return
    part = x if _is_whole(index, x) else x[index]
    if part.dim():
        part.fill_(value)
    else:
        part.copy_(value)


def _is_basic(index: Any) -> bool:
    """Whether an index makes a view, by integers, slices, new and all other dimensions."""
    return all(part is None or part is ... or type(part) is int or type(part) is slice and all(
        bound is None or type(bound) is int for bound in (part.start, part.stop, part.step)) for part in _parts(index))


def _is_whole(index: Any, x: Tensor) -> bool:
    """Whether an index takes all of ``x``, of which no view is made then (`applySlice` in ATen/TensorIndexing.h)."""
    parts = _parts(index)
    if not all(part is ... or type(part) is slice for part in parts) or parts.count(...) > 1 or len(parts) > x.dim():
        return False
    before = parts.index(...) if ... in parts else len(parts)
    sizes = [*x.shape[:before], None, *x.shape[x.dim() - len(parts) + before + 1:]]
    return all(part is ... or part.indices(size) == (0, size, 1) for part, size in zip(parts, sizes))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _with_tensors(state: MetaState, x: Tensor, index: Any) -> Any:
    """``x[[0, 2]]``: C++ would make a tensor of the list where ``x`` really lives, and its contents would be lost."""
    if type(index) is list and not all(type(i) in (int, bool) for i in index):
        index = tuple(index)  # as treatSequenceAsTuple in torch/csrc/autograd/python_variable_indexing.cpp
    if type(index) in _SEQUENCES or type(index) is tuple and any(type(i) in (*_SEQUENCES, tuple) for i in index):
        device = device_of(x)
        return _index_tensor(state, index, device) if type(index) is not tuple else tuple(
            _index_tensor(state, i, device) for i in index)
    return index

_SEQUENCES = (list, numpy.ndarray)


def _index_tensor(state: MetaState, index: Any, device: torch.device) -> Any:
    if isinstance(index, numpy.ndarray):
        return _known(state, index, device) if index.dtype.kind in "iub" else index
    if type(index) not in (list, tuple) or not index:
        return index
    if _holds_numbers(index):
        return _known(state, index, device)
    if all(type(i) is int or isinstance(i, Tensor) and i.dim() == 0 for i in index):
        return torch.stack([i if isinstance(i, Tensor) else _known(state, i, device) for i in index])
    return index


def _holds_numbers(values: Any) -> bool:
    return all(type(v) in (int, bool) or type(v) in (list, tuple) and _holds_numbers(v) for v in values)


def _known(state: MetaState, data: Any, device: torch.device) -> Tensor:
    made: Tensor = make_tensor(state, torch.tensor, (data,), {"device": device})
    return made
