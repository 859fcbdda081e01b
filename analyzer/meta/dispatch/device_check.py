"""Tensors of one operator call must be on one device, as kernels of devices demand and those of meta do not."""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from analyzer.meta.operator_info import OperatorInfo
from analyzer.meta.state import MetaState
from analyzer.meta.tensor import device_of

from .resolve import OperatorCall

# These read from other devices, or ask for sizes alone: they copy (Copy.cpp; the scatters of TensorShape.cpp copy into
# a clone), share a storage, or move lengths and targets as CTC does (LossCTC.cpp).
_CROSSING = frozenset(
    "copy_ _foreach_copy_ _foreach_copy set_ is_set_to is_same_size resize_as_ copy_sparse_to_sparse_ slice_scatter "
    "select_scatter diagonal_scatter as_strided_scatter expand_as view_as reshape_as _use_cudnn_ctc_loss "
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


def follow_met(call: OperatorCall) -> None:
    """Tell new storages where all that a call took on a device is data that was met on the way."""
    on_device = [s for s in call.storages if s.device.type != "cpu"]
    if on_device and all([s.is_met for s in on_device]):
        for storage in call.born:
            if storage is not None:
                storage.is_met = True


def check_devices(state: MetaState, call: OperatorCall) -> bool:
    """Whether the next call of the same specs need not be checked. Raise RuntimeError, as PyTorch words it, where a
    call's tensors are on devices that its kernel does not join.

    Sources: ``TensorIteratorBase::compute_types`` in aten/src/ATen/TensorIterator.cpp for pointwise kernels, and for
    the others the check before each kernel (torchgen/dest/register_dispatch_key.py, ``device_check`` in
    native_functions.yaml). Operators of other libraries check for themselves. Data that was met on the way, as a list
    of tensors that a module keeps, is taken to be on the device, and stands beside tensors of the host as well.
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
    try:
        if info.is_foreach:
            for group in _each(given):
                _check_operands(info, group)
            return True
        operands = list(_operands(given))
        if "Tensor?[] indices" in str(info.op._schema):  # of `index` and `index_put`, which move them: make_info
            _check_indices(info, [o for o in operands if o.name in ("self", "indices")])
            operands = [o for o in operands if o.name != "indices"]
        _check_operands(info, operands)
        return True
    except RuntimeError as error:
        raise RuntimeError(f"{error} {state.where()}\n"
                           "Way out: move one of them with .to(), or make it with device=; a model for the host "
                           "alone is profiled with device='cpu'.") from None


def _operands(given: list[tuple[str, Any]]) -> Iterator[_Operand]:
    for name, value in given:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor) and name not in _ON_HOST:
                yield _Operand(name, tuple(one.shape), device_of(one))


def _each(given: list[tuple[str, Any]]) -> Iterator[list[_Operand]]:
    """The tensors of each element of a foreach call: mixed lists are left to single calls (ForeachUtils.h)."""
    length = max(len(value) for _, value in given if isinstance(value, (list, tuple)))
    for i in range(length):
        yield list(_operands([(name, value[i] if isinstance(value, (list, tuple)) and len(value) == length else value)
                              for name, value in given]))


def _check_operands(info: OperatorInfo, operands: list[_Operand]) -> None:
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


def _check_indices(info: OperatorInfo, operands: list[_Operand]) -> None:
    indexed = operands[0]
    for index in operands[1:]:
        if index.device not in (indexed.device, torch.device("cpu")):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor "
                               f"({indexed.device}) ({info.text}: {indexed}, {index})")


@functools.cache
def _takes_numbers(info: OperatorInfo) -> bool:
    """Whether a tensor of no dimensions on the host may stand beside those of a device."""
    name = info.name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return name in _TAKING_NUMBERS or packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
