"""An operator that is met first: what kernels of devices refuse, what that on meta gives, and how to make it again."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer.errors import UnsupportedOperatorError
from analyzer.meta import argument as collective
from analyzer.meta.address_space import MetaStorage, next_number
from analyzer.meta.copied_tensor import own_storages
from analyzer.meta.operator_info import (
    Held,
    OperatorFacts,
    device_shapes,
    has_rule,
    hold_before,
    host_shapes,
    kernel_memory,
    register_shape_impl,
    sparse_shapes,
)
from analyzer.meta.refusal.check import check_call
from analyzer.meta.refusal.overlap import check_outputs
from analyzer.meta.spec import SPARSE_LAYOUTS, Signature, TensorSpec, parts_of, spec_of, to_specs
from analyzer.meta.state import CPU, MetaState, never_pinned
from analyzer.meta.tensor import META, device_of, kernel, take_class

from .call import LARGEST, NEW, SAME, VALUE, VIEW, Entry, OperatorCall, OutputRecipe, entries, result_device, values_at

Tensor = torch.Tensor
_aten = torch.ops.aten


def run_kernel(state: MetaState, call: OperatorCall, key: Any) -> None:
    """Give ``call`` what its kernel returns, on devices, and its signature; keep both under ``key``, if any."""
    info = call.info
    if info.name == "set_":
        call.args = own_storages(state, call.args)
    args, kwargs, tensors = call.args, call.kwargs, call.tensors
    if not check_devices(state, call) or kwargs.get("pin_memory"):
        key = None
    if info.has_out:
        check_outputs(info.op, info.name, args, kwargs)
    if info.refuses_overlaps:
        _check_overlaps(call)
    device = result_device(state, call.storages, kwargs.get("device"))
    check_call(info.op, info.name, device.type, args, kwargs)
    spec_args, spec_kwargs = to_specs(args), to_specs(kwargs)
    for i, values in zip(info.packed, values_at(args, info.packed)):
        if values is not None:
            spec_args[i] = spec_args[i].with_values(values)
    inputs = tuple(spec_of(t) for t in tensors)
    result = _call(state, info, args, kwargs, device, any(t.layout in SPARSE_LAYOUTS for t in tensors))
    structure = type(result) if isinstance(result, (list, tuple)) else None
    call.outputs = list(result) if structure is not None else [result]
    stages: tuple[Held, ...] = ()
    order: tuple[int, ...] | None = None
    if has_rule(info):  # what the kernel holds must be known before its outputs are allocated
        specs = tuple(TensorSpec.of(tuple(o.shape), o.stride(), o.dtype, str(device))
                      for o in call.outputs if isinstance(o, Tensor))
        stages, order = kernel_memory(Signature(info.op, spec_args, spec_kwargs, inputs, specs))
    _place_outputs(state, call, device, stages, order)
    call.result = structure(call.outputs) if structure is not None else call.outputs[0]
    call.signature = Signature(info.op, spec_args, spec_kwargs, inputs,
                               tuple(spec_of(o) for o in call.outputs if isinstance(o, Tensor)))
    call.stages = kernel_memory(call.signature)[0] if has_rule(info) else ()
    if key is not None and (recipes := _make_recipes(call)) is not None:
        if len(entries) >= LARGEST:
            entries.clear()
        entries[key] = Entry(call.signature, recipes, structure)


def _place_outputs(state: MetaState, call: OperatorCall, device: torch.device, stages: tuple[Held, ...],
                   order: tuple[int, ...] | None) -> None:
    call.born = [None] * len(call.outputs)
    for position, i in enumerate(order or range(len(call.outputs))):
        out = call.outputs[i]
        if not isinstance(out, Tensor):
            continue
        if out.layout is not torch.strided:
            take_class(out)
            for part in parts_of(out):
                if not isinstance(part.untyped_storage(), MetaStorage):
                    state.space.attach(part, device)
            continue
        if type(out.untyped_storage()) is MetaStorage:
            if any(out is t for t in call.tensors):
                continue
        elif out.device.type != "meta":  # a kernel that made a constant on the host
            call.outputs[i] = collective.adopt(state, out, is_new=True)
            continue
        else:
            hold_before(state, stages, position, device, call.kept)
            place, is_zero = CPU if i in call.info.host_outputs else device, out._is_zerotensor()
            born = call.born[i] = state.space.attach(out, place, is_zero=is_zero)
            if is_zero:
                state.zeros[born.number] = born
        if type(out) is Tensor:
            take_class(out)
    for _, written in call.written():  # ``resize_`` and ``out=`` variants can make a storage larger
        storage = written.untyped_storage() if written.layout is torch.strided else None
        if isinstance(storage, MetaStorage):
            storage.follow_origin(written.dtype)
            if storage.nbytes() > storage.region.bytes:
                storage.space.resize(storage, next_number())
            elif not call.info.cacheable and storage.space.listener is not None:  # within its block
                storage.space.listener.resized(storage.number, storage)


def _make_recipes(call: OperatorCall) -> list[OutputRecipe] | None:
    numbers = {s.number: i for i, s in reversed(list(enumerate(call.storages)))}
    recipes = []
    for out, born in zip(call.outputs, call.born):
        if not isinstance(out, Tensor):
            if out is not None and not isinstance(out, (int, float, bool)):
                return None
            recipes.append(OutputRecipe(VALUE, value=out))
            continue
        if out.layout is not torch.strided or out.dtype.is_complex or out.is_neg() or out.is_quantized:
            return None
        shape, stride = tuple(out.shape), out.stride()
        if born is not None:
            extent = 0 if out.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
            if out.storage_offset() or born.nbytes() != extent * out.itemsize or out.is_conj():
                return None
            recipes.append(OutputRecipe(NEW, shape, stride, out.dtype, born.device))
            continue
        same = next((i for i, t in enumerate(call.tensors) if t is out), None)
        if same is not None:
            recipes.append(OutputRecipe(SAME, source=same))
            continue
        storage = out.untyped_storage()
        i = numbers.get(storage.number, -1) if isinstance(storage, MetaStorage) else -1
        if i < 0 or call.tensors[i].dtype != out.dtype or call.tensors[i].dtype.is_complex:
            return None
        offset = int(out.storage_offset() - call.tensors[i].storage_offset())
        recipes.append(OutputRecipe(VIEW, shape, stride, source=i, offset=offset))
    return recipes


def _call(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any], device: torch.device,
          is_sparse: bool) -> Any:
    func = info.op
    if "device" in kwargs:
        kwargs = {**kwargs, "device": META}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": never_pinned(state)}
    shape_impl = (register_shape_impl.find(func) or register_shape_impl.find(func.overloadpacket)
                  or (device_shapes if device.type == "cuda" else host_shapes).get(func))
    if info.communicates and collective.impl is not None:
        shape_impl = collective.impl.shape(info) or shape_impl
    _check_dtypes(func, args)
    registration = f"`@register_shape_impl(torch.ops.{func.namespace}.{func.__name__})`"
    if is_sparse:  # meta kernels of sparse tensors lose their elements
        shape_impl = register_shape_impl.find(func) or sparse_shapes.get(func)
        if shape_impl is None:
            raise UnsupportedOperatorError(
                f"{func} of sparse tensors: how many elements its result stores is not followed. {state.where()}\n"
                "Way out: pass what it gives to the model, use a dense tensor here, or register its result with "
                f"{registration}. Of the optimizers, SparseAdam, Adagrad and SGD without momentum take sparse "
                "gradients.")
    with kernel, torch._C.DisableTorchFunction():
        if shape_impl is not None:
            return shape_impl(*args, **kwargs)
        try:
            if info.is_foreach and (alike := _find_alike(args, kwargs)) is not None:
                return _run_alike(func, args, kwargs, alike)
            return _lay_out_pointwise(func, args, kwargs, func(*args, **kwargs), device.type)
        except (AssertionError, ZeroDivisionError, KeyError) as error:  # of Python, where kernels are written in C++
            raise RuntimeError(f"{func}: {error}") from error
        except RuntimeError as error:  # of which NotImplementedError is one
            # torch/_library/custom_ops.py
            if not isinstance(error, NotImplementedError) and "no fake impl" not in str(error):
                raise
            shape_impl = (device_shapes.get(func) or torch._decomp.decomposition_table.get(func)
                          or _written_out(func, kwargs))
            if shape_impl is None:
                reason = str(error).splitlines()[0].partition(". ")[0]
                raise UnsupportedOperatorError(
                    f"{func} cannot run without data: it has no meta kernel ({reason}). {state.where()}\n"
                    f"Give it a shape: {registration} on a function of the same arguments that returns empty tensors, "
                    "or `torch.library.register_fake`.") from error
            return shape_impl(*args, **kwargs)


def _find_alike(args: Any, kwargs: dict[str, Any]) -> list[int] | None:
    """Of each element of a foreach call the first one that is like it: kernels on meta look at each by itself, and
    optimizers give them hundreds. None where all differ, or what is given is not a list for each.
    """
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    if not lists or len({len(each) for each in lists}) > 1 or any(
            isinstance(x, (list, tuple)) or isinstance(x, Tensor) and x.dim() for x in (
                *(arg for arg in args if not isinstance(arg, (list, tuple))), *kwargs.values())):
        return None
    first: dict[Any, int] = {}
    found = [first.setdefault(tuple([
        (x.shape, x.stride(), x.dtype, x.layout, x.is_conj(), x.is_neg()) if isinstance(x, Tensor) else type(x)
        for x in element]), place) for place, element in enumerate(zip(*lists))]
    return found if len(first) < len(found) else None


def _run_alike(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], alike: list[int]) -> Any:
    """What a foreach operator gives on meta, run with one of all elements that are alike."""
    places = sorted(set(alike))
    result = func(*[[arg[place] for place in places] if isinstance(arg, (list, tuple)) else arg for arg in args],
                  **kwargs)
    made = dict(zip(places, result or ()))  # none where it writes in place
    return None if result is None else [made[first] if first == place else torch.empty_like(made[first])
                                        for place, first in enumerate(alike)]


def _written_out(func: torch._ops.OpOverload, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What writes into ``out`` where only the operator that makes its result has a meta kernel: ``_scaled_mm``."""
    functional = getattr(func.overloadpacket, "default", None)
    if functional is None or not isinstance(kwargs.get("out"), Tensor) or func is functional:
        return None

    def write(*args: Any, out: Tensor, **others: Any) -> Tensor:
        made = functional(*args, **others)
        if made.shape != out.shape or made.dtype != out.dtype:
            raise RuntimeError(f"{func}: out is {tuple(out.shape)} of {out.dtype}, and the result {tuple(made.shape)} "
                               f"of {made.dtype}")
        return out
    return write


# Torch's meta kernels (``torch/_refs``) find strides from converted arguments: an expanded one is contiguous then. In
# TensorIterator it has no say in the order of dimensions, and only the CPU converts, where dtypes differ
# (TensorIterator.cpp, promote_inputs_to_common_dtype).

def _lay_out_pointwise(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], result: Any, kind: str) -> Any:
    """``result`` of a call on meta, in the order of dimensions that a device of a ``kind`` gives it."""
    if type(result) is not Tensor or torch.Tag.pointwise not in op.tags or op._schema.is_mutable or result.dim() < 2:
        return result
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    dtypes = {t.dtype for t in given} - {torch.bool}
    if len(given) < 2 or dtypes == {torch.float32} or not any(map(_is_expanded, given)):
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


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))


def _as_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32, device=tensor.device)


# Which arguments must agree: the TORCH_CHECKs of aten/src/ATen/native/{,cuda/}{LinearAlgebra,Blas}.cpp, and
# of TensorIterator where it neither promotes nor casts (the gradients of losses),
# and of the sources of the others: Cross.cpp, GridSampler.cpp, Distance.cpp, SoftMax.cpp, Loss.cpp, BinaryOps.cpp.
_SAME_DTYPE = {
    **dict.fromkeys((_aten.mm, _aten.mv, _aten.linalg_cross, _aten.grid_sampler_2d, _aten.grid_sampler_3d,
                     _aten._cdist_forward, _aten._softmax_backward_data, _aten._log_softmax_backward_data,
                     _aten.heaviside, _aten.heaviside_, _aten.binary_cross_entropy), (0, 1)),
    **dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.addmv, _aten.addmv_, _aten.addbmm, _aten.addbmm_,
                     _aten.baddbmm_, _aten.huber_loss_backward, _aten.mse_loss_backward,
                     _aten.smooth_l1_loss_backward), (0, 1, 2)),
    **dict.fromkeys((_aten.index_copy, _aten.index_copy_), (0, 3))}


def _check_dtypes(op: torch._ops.OpOverload, args: Any) -> None:
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
    for _, t in call.written():
        if t.layout is torch.strided and _is_expanded(t) and t.numel():
            raise RuntimeError(
                f"{call.info.text} writes to a tensor of {list(t.shape)} with strides {list(t.stride())}, where one "
                "place in memory is several elements, as it was expanded: clone() it before")


# These read from other devices, or ask for sizes alone: they copy (Copy.cpp; the scatters of TensorShape.cpp copy into
# a clone), share a storage, or move lengths and targets as CTC does (LossCTC.cpp).
_CROSSING = frozenset(
    "copy copy_ _foreach_copy_ _foreach_copy set_ is_set_to is_same_size resize_as_ copy_sparse_to_sparse_ "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter expand_as view_as reshape_as _use_cudnn_ctc_loss "
    "_cudnn_ctc_loss _ctc_loss _ctc_loss_backward record_stream _pin_memory".split())
# Arguments that may be on the host: a rate that a fused optimizer reads (cuda/FusedAdamKernel.cu), numbers of a foreach
# call (ForeachUtils.h, convert_tensor_to_scalar_list), the state of a generator that attention keeps (attention.cu).
_ON_HOST = frozenset({"lr", "scalars", "philox_seed", "philox_offset", "rng_state", "unused"})
# Kernels besides pointwise ones that take a number in a tensor on the host (Fill.cpp, TensorAdvancedIndexing.cpp).
_TAKING_NUMBERS = frozenset({"fill", "masked_fill", "index_fill", "index_put", "_index_put_impl", "_unsafe_index_put"})


class _Operand(NamedTuple):
    name: str
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} is on {self.device}"


def check_devices(state: MetaState, call: OperatorCall) -> bool:
    """Whether the next call of the same specs need not be checked. Raises RuntimeError for devices no kernel joins.

    Sources: ``TensorIteratorBase::compute_types`` in aten/src/ATen/TensorIterator.cpp for pointwise kernels, and for
    the others the check before each kernel (torchgen/dest/register_dispatch_key.py, ``device_check`` in
    native_functions.yaml). Operators of other libraries check for themselves. Data that was met on the way, as a list
    of tensors that a module keeps, is assumed to be on the device, and stands beside tensors of the host as well.
    """
    devices = {s.device for s in call.storages}
    if len(devices) < 2 or any(d.type == "meta" for d in devices):
        return True
    if all(s.is_met for s in call.storages if s.device.type != "cpu"):
        return False
    info = call.info
    if info.op.namespace not in ("aten", "torchvision") or info.name in _CROSSING:
        return True
    given = [*zip(info.arguments, call.args), *call.kwargs.items()]
    groups = [given]
    if info.is_foreach:  # element by element: mixed lists are left to single calls (ForeachUtils.h)
        length = max(len(value) for _, value in given if isinstance(value, (list, tuple)))
        groups = [[(name, value[i] if isinstance(value, (list, tuple)) and len(value) == length else value)
                   for name, value in given] for i in range(length)]
    try:
        for group in groups:
            _check_operands(info, group)
    except RuntimeError as error:
        raise RuntimeError(f"{error} {state.where()}\n"
                           "Way out: move one of them with .to(), or make it with device=; a model for the host "
                           "alone is profiled with device='cpu'.") from None
    return True


def _check_operands(info: OperatorFacts, given: list[tuple[str, Any]]) -> None:
    operands = []
    for name, value in given:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor) and name not in _ON_HOST:
                operands.append(_Operand(name, tuple(one.shape), device_of(one)))
    if "Tensor?[] indices" in str(info.op._schema):  # of `index` and `index_put`, which move them: make_info
        indexed = operands[0]
        for index in operands:
            if index.name == "indices" and index.device not in (indexed.device, CPU):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor "
                                   f"({indexed.device}) ({info.text}: {indexed}, {index})")
        operands = [o for o in operands if o.name != "indices"]
    on_device = next((o for o in operands if o.device.type != "cpu"), None)
    if on_device is None:
        return
    written = {name for _, name, _ in info.mutated}
    numbers = 0
    for operand in operands:
        if operand.device == on_device.device:
            continue
        if operand.device.type != "cpu" or operand.shape or operand.name in written or not _takes_numbers(info):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, "
                               f"{on_device.device} and {operand.device}! ({info.text}: {on_device}, {operand})")
        numbers += 1
        if numbers > 1 and info.name != "where":  # which moves each: where_self_out in TensorCompare.cpp
            raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel! "
                               f"({info.text}: {', '.join(map(str, operands))})")


@functools.cache
def _takes_numbers(info: OperatorFacts) -> bool:
    """Whether a tensor of no dimensions on the host may stand beside those of a device."""
    name = info.name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return name in _TAKING_NUMBERS or packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def follow_met(call: OperatorCall) -> None:
    on_device = [s for s in call.storages if s.device.type != "cpu"]
    if on_device and all([s.is_met for s in on_device]):
        for storage in call.born:
            if storage is not None:
                storage.is_met = True
