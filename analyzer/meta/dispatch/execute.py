"""The outputs of an operator: specs that a cache has or a meta kernel gives, and tensors of these specs."""
from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer.errors import UnsupportedOperatorError
from analyzer.meta import argument as collective
from analyzer.meta.address_space import MetaStorage, next_number
from analyzer.meta.argument import adopt
from analyzer.meta.memory_need import Stage, has_rule, kernel_memory, stages_of
from analyzer.meta.operator_info import OperatorInfo, device_shapes, host_shapes, register_shape_impl, sparse_shapes
from analyzer.meta.spec import SPARSE_LAYOUTS, Signature, TensorSpec, parts_of, spec_of, to_specs
from analyzer.meta.state import CPU, MetaState
from analyzer.meta.tensor import META, MetaTensor, attach, kernel

from .account import hold_before
from .device_check import check_devices
from .resolve import NEW, SAME, VIEW, Entry, OperatorCall, entries, make_recipes, remember, result_device, values_at

# Strides of what pointwise operators give, where torch's meta kernels get them wrong.
#
# These kernels (``torch/_refs``) convert arguments to the dtype in which is computed, and find the strides of the
# result
# from the converted ones. A tensor that is expanded, as the gradient of a sum, is contiguous when it was converted; in
# the kernels of devices (TensorIterator) it has no say in the order of dimensions. Only the CPU converts as meta does,
# and only where dtypes differ (TensorIterator.cpp, promote_inputs_to_common_dtype).

Tensor = torch.Tensor


def lay_out_pointwise(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], result: Any, kind: str) -> Any:
    """``result`` of a call on meta, in the order of dimensions that a device of a ``kind`` gives it."""
    if type(result) is not Tensor or torch.Tag.pointwise not in op.tags or op._schema.is_mutable or result.dim() < 2:
        return result
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    dtypes = {t.dtype for t in given} - {torch.bool}
    if len(given) < 2 or dtypes == {torch.float32} or not any(map(is_expanded, given)):
        return result
    if kind == "cpu" and len(dtypes) > 1:
        return result
    args, kwargs = tree_map_only(Tensor, _as_float32, (args, kwargs))
    try:
        strides = op(*args, **kwargs).stride()
    except (RuntimeError, TypeError):  # an operator of other dtypes
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def like_sum(one: Tensor, other: Tensor) -> Tensor:
    """An empty tensor on meta like the sum of two of one dtype, as TensorIterator lays it out."""
    total = _as_float32(one) + _as_float32(other)
    return torch.empty_strided(total.shape, total.stride(), dtype=one.dtype, device=one.device)


def is_expanded(tensor: Tensor) -> bool:
    """Whether one place in memory is several of its elements."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))


def _as_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32, device=tensor.device)


# Execute: the outputs of an operator, made again as they were for the same specs, or by its kernel on meta.

_aten = torch.ops.aten
_empty_strided = torch.empty_strided
_as_strided = torch.as_strided
_default_dtype = torch.get_default_dtype
_FLOAT32 = torch.float32
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradMeta


def execute(state: MetaState, call: OperatorCall) -> None:
    """Give ``call`` its result, outputs and signature."""
    key: Any = None
    if call.key is not None and call.info.cacheable:
        try:
            key = tuple(call.key)
            default = _default_dtype()
            if default is not _FLOAT32:  # which factories, and quotients of integers, have where nothing else says it
                key = (default, *key)
            entry = entries.get(key)
        except (TypeError, NotImplementedError):
            key = None  # an argument that cannot be hashed or compared, as an object of C++
        else:
            if entry is not None:
                _build(state, call, entry)
                return
    _run(state, call, key)


# -- made again -------------------------------------------------------------------------------------------------------


def _build(state: MetaState, call: OperatorCall, entry: Entry) -> None:
    """Make the outputs by their recipes."""
    signature = call.signature = entry.signature
    stages, order = kernel_memory(signature) if has_rule(call.info) else ((), None)
    call.stages, recipes = stages, entry.recipes
    outputs: list[Any] = []
    born: list[MetaStorage | None] = []
    for i, r in enumerate(recipes if order is None else [recipes[k] for k in order]):
        kind = r.kind
        storage = None
        if kind == NEW:
            if stages:
                hold_before(state, stages, i, r.device, call.kept)
            out = _empty_strided(r.shape, r.stride, dtype=r.dtype, device=META)
            storage = attach(out, r.device, state.space)
            out.__class__ = MetaTensor
        elif kind == SAME:
            out = call.tensors[r.source]
        elif kind == VIEW:
            out = _view(call.tensors[r.source], r.shape, r.stride, r.offset)
        else:
            out = r.value
        outputs.append(out)
        born.append(storage)
    if order is not None:
        returned = sorted(range(len(order)), key=order.__getitem__)
        outputs, born = [outputs[k] for k in returned], [born[k] for k in returned]
    call.outputs, call.born = outputs, born
    call.result = outputs[0] if entry.structure is None else entry.structure(outputs)


def _view(base: Tensor, shape: Any, stride: Any, offset: int) -> Tensor:
    if base.requires_grad and not _is_excluded(_AUTOGRAD):
        # Autograd detaches a result that it saves while its own kernels are on: a view with a history would hold its
        # own node.
        base = base.data
    kernel.depth += 1
    try:
        out = _as_strided(base, shape, stride, base.storage_offset() + offset)
    finally:
        kernel.depth -= 1
    out.__class__ = MetaTensor
    return out


# -- by the kernel on meta --------------------------------------------------------------------------------------------


def _run(state: MetaState, call: OperatorCall, key: Any) -> None:
    """Run the kernel, give devices to what it returns, and remember how to make that again."""
    info, args, kwargs, tensors = call.info, call.args, call.kwargs, call.tensors
    if not check_devices(state, call):
        key = None
    if info.refuses_overlaps:
        _check_overlaps(call)
    device = result_device(state, call.storages, kwargs.get("device"))
    spec_args, spec_kwargs = to_specs(args), to_specs(kwargs)
    for i, values in zip(info.packed, values_at(args, info.packed)):
        if values is not None:
            spec_args[i] = spec_args[i].with_values(values)
    inputs = tuple(spec_of(t) for t in tensors)
    is_sparse = any(t.layout in SPARSE_LAYOUTS for t in tensors)
    result = _call_kernel(state, info, args, kwargs, device, is_sparse)
    structure = type(result) if isinstance(result, (list, tuple)) else None
    call.outputs = list(result) if structure is not None else [result]
    early: tuple[Stage, ...] = ()
    order: tuple[int, ...] | None = None
    if has_rule(info):  # what the kernel holds must be known before its outputs are allocated
        specs = tuple(TensorSpec.of(tuple(o.shape), o.stride(), o.dtype, str(device))
                      for o in call.outputs if isinstance(o, Tensor))
        early, order = kernel_memory(Signature(info.op, spec_args, spec_kwargs, inputs, specs))
    _place_outputs(state, call, device, early, order)
    _grow_written(call)
    call.result = structure(call.outputs) if structure is not None else call.outputs[0]
    call.signature = Signature(info.op, spec_args, spec_kwargs, inputs,
                               tuple(spec_of(o) for o in call.outputs if isinstance(o, Tensor)))
    call.stages = stages_of(call.signature) if has_rule(info) else ()
    if key is not None:
        recipes = make_recipes(call.outputs, tensors, call.storages, call.born)
        if recipes is not None:
            remember(key, Entry(call.signature, recipes, structure))


def _place_outputs(state: MetaState, call: OperatorCall, device: torch.device, stages: tuple[Stage, ...],
                   order: tuple[int, ...] | None) -> None:
    """Give the outputs of a kernel places in memory, in the order in which the device allocates them."""
    outputs = call.outputs
    call.born = [None] * len(outputs)
    for position, i in enumerate(order or range(len(outputs))):
        out = outputs[i]
        if not isinstance(out, Tensor):
            continue
        if out.layout is not torch.strided:
            out.__class__ = MetaTensor
            for part in parts_of(out):
                if not isinstance(part.untyped_storage(), MetaStorage):
                    attach(part, device, state.space)
            continue
        if type(out.untyped_storage()) is MetaStorage:
            if any(out is t for t in call.tensors):
                continue
        elif out.device.type != "meta":  # a kernel that made a constant on the host
            outputs[i] = adopt(state, out, is_new=True)
            continue
        else:
            if stages:
                hold_before(state, stages, position, device, call.kept)
            call.born[i] = attach(out, CPU if i in call.info.host_outputs else device, state.space)
        if type(out) is Tensor:
            out.__class__ = MetaTensor


def _grow_written(call: OperatorCall) -> None:
    """``resize_`` and ``out=`` variants can make a storage larger."""
    for _, written in call.written():
        storage = written.untyped_storage() if written.layout is torch.strided else None
        if isinstance(storage, MetaStorage) and storage.nbytes() > storage.region.bytes:
            storage.space.resize(storage, next_number())


def _call_kernel(state: MetaState, info: OperatorInfo, args: Any, kwargs: dict[str, Any], device: torch.device,
                 is_sparse: bool) -> Any:
    func = info.op
    if "device" in kwargs:
        kwargs = {**kwargs, "device": META}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    shape_impl = (register_shape_impl.find(func) or register_shape_impl.find(func.overloadpacket)
                  or (device_shapes if device.type == "cuda" else host_shapes).find(func))
    if info.communicates and collective.impl is not None:
        shape_impl = collective.impl.shape(info) or shape_impl
    _check_dtypes(func, args)
    if is_sparse:  # meta kernels of sparse tensors lose their elements
        shape_impl = register_shape_impl.find(func) or sparse_shapes.find(func)
        if shape_impl is None:
            raise _no_sparse_kernel(state, func)
    with kernel, torch._C.DisableTorchFunction():
        if shape_impl is not None:
            return shape_impl(*args, **kwargs)
        try:
            return lay_out_pointwise(func, args, kwargs, func(*args, **kwargs), device.type)
        except RuntimeError as error:  # of which NotImplementedError is one
            # torch/_library/custom_ops.py
            if not isinstance(error, NotImplementedError) and "no fake impl" not in str(error):
                raise
            shape_impl = device_shapes.find(func) or torch._decomp.decomposition_table.get(func)
            if shape_impl is None:
                raise _no_kernel(state, func, error) from error
            return shape_impl(*args, **kwargs)


# Which arguments must agree: the TORCH_CHECKs of aten/src/ATen/native/{,cuda/}{LinearAlgebra,Blas,Convolution}.cpp, and
# of TensorIterator where it neither promotes nor casts (the gradients of losses).
_SAME_DTYPE = {_aten.mm: (0, 1), _aten.addmm: (0, 1, 2), _aten.mv: (0, 1), _aten.addmv: (0, 1, 2),
               _aten.convolution: (0, 1, 2), _aten.huber_loss_backward: (0, 1, 2),
               _aten.mse_loss_backward: (0, 1, 2), _aten.smooth_l1_loss_backward: (0, 1, 2)}


def _check_dtypes(op: torch._ops.OpOverload, args: Any) -> None:
    """Raise RuntimeError where dtypes that must agree differ: kernels on CPU and CUDA do, those on meta do not."""
    positions = _SAME_DTYPE.get(op.overloadpacket)
    if positions is None:
        return
    if op._overloadname.startswith("dtype"):  # with out_dtype what is added may have it: Blas.cpp, _addmm_dtype_cuda
        positions = positions[-2:]
    dtypes = {a.dtype: None for a in (args[i] for i in positions if i < len(args)) if isinstance(a, Tensor)}
    if len(dtypes) > 1:
        names = " and ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise RuntimeError(f"{op.overloadpacket}: expected its tensors to have the same dtype, but got {names}")


def _check_overlaps(call: OperatorCall) -> None:
    """Raise RuntimeError where an expanded tensor is written to: kernels on CPU and CUDA do, those on meta do not."""
    for _, t in call.written():
        if t.layout is torch.strided and is_expanded(t) and t.numel():
            raise RuntimeError(
                f"{call.info.text} writes to a tensor of {list(t.shape)} with strides {list(t.stride())}, where one "
                "place in memory is several elements, as it was expanded: clone() it before")


def _no_kernel(state: MetaState, func: Any, error: RuntimeError) -> UnsupportedOperatorError:
    namespace, reason = func.namespace, str(error).splitlines()[0].partition(". ")[0]
    return UnsupportedOperatorError(
        f"{func} cannot run without data: it has no meta kernel ({reason}). {state.where()}\n"
        f"Give it a shape: `@register_shape_impl(torch.ops.{namespace}.{func.__name__})` on a function of the "
        f"same arguments that returns empty tensors, or `torch.library.register_fake`.")


def _no_sparse_kernel(state: MetaState, func: Any) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{func} of sparse tensors: how many elements its result stores is not followed. {state.where()}\n"
        "Way out: pass what it gives to the model, use a dense tensor here, or register its result with "
        f"`@register_shape_impl(torch.ops.{func.namespace}.{func.__name__})`. Of the optimizers, SparseAdam, Adagrad "
        "and SGD without momentum take sparse gradients.")
