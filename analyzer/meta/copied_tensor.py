"""Copies of fake tensors: those that `copy` and `pickle` make, as PyTorch makes them of tensors with data."""
from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from .address_space import AddressSpace, MetaStorage, new_storage
from .intercept.mode_stack import without_modes
from .simulated_device import is_simulating
from .spec import SPARSE_LAYOUTS, parts_of
from .state import CPU, MetaState, current, indexed_device
from .tensor import META, MetaTensor, device_of, keep_class, kernel, tensor_on
from .value.known_value import Deferred

Tensor = torch.Tensor


def deepcopy_tensor(tensor: Tensor, memo: dict[int, Any], fake: Tensor | None = None) -> Tensor:
    """A parameter's data alone, of anything else the whole storage, its gradient and its attributes (__deepcopy__ in
    torch/nn/parameter.py and torch/_tensor.py). One that has data is copied as ``fake``, which stands for it.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if isinstance(tensor, nn.Parameter):
        memo[id(tensor)] = parameter = nn.Parameter(_clone(tensor), tensor.requires_grad)
        return parameter
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol "
                           "at the moment.  If you were attempting to deepcopy a module, this may be because of a "
                           "torch.nn.utils.weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001")
    result = _clone(tensor) if tensor.layout in SPARSE_LAYOUTS else copy_tensor(tensor if fake is None else fake, memo)
    memo[id(tensor)] = result
    result.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        result.grad = copy.deepcopy(tensor.grad, memo)
    result.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    return result


def _clone(tensor: Tensor) -> Tensor:
    if is_simulating():
        return tensor.detach().clone(memory_format=torch.preserve_format)
    with kernel, without_modes():
        out = torch.empty_like(tensor.detach())
        for part, old in zip(*([parts_of(t) if t.layout in SPARSE_LAYOUTS else [t] for t in (out, tensor)])):
            storage = old.untyped_storage()
            assert isinstance(storage, MetaStorage)
            storage.space.attach(part, storage.device)
    return keep_class(out)  # type: ignore[no-any-return]


def copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A tensor on a copy of the whole storage of another, of which ``memo`` has one."""
    old = tensor.untyped_storage()
    assert isinstance(old, MetaStorage)
    key = -old.number - 1  # a memo key that no id() can be
    if key not in memo:
        memo[key] = old.clone()
    with without_modes():
        return tensor_on(memo[key], tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


class _CopiedStorage:
    """The storage of a tensor that is copied: the same one for `copy.copy`, another where it is pickled."""

    def __init__(self, storage: MetaStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        known = self.storage.exact
        contents = None if known is None else (known.flat().view(torch.uint8).numpy().tobytes(), known.flat().dtype)
        return read_storage, (self.storage.nbytes(), str(self.storage.device), contents)


_held: weakref.WeakValueDictionary[int, _CopiedStorage] = weakref.WeakValueDictionary()  # by the number of the storage
_SAVES = (torch.serialization._save.__code__, torch.serialization._legacy_save.__code__)


def _hold(storage: MetaStorage) -> _CopiedStorage:
    """One for all tensors of a storage where `torch.save` pickles them. `pickle` alone has a storage of each."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code not in _SAVES:
        frame = frame.f_back
    if frame.f_code not in _SAVES:
        return _CopiedStorage(storage)
    held = _held.get(storage.number)
    if held is None:
        held = _held[storage.number] = _CopiedStorage(storage)
    return held


def reduce_tensor(tensor: Tensor, protocol: Any) -> Any:
    """As ``__reduce_ex__`` in torch/nn/parameter.py and torch/_tensor.py."""
    attributes = {name: value for name, value in tensor.__dict__.items() if name != "_is_param"}
    if isinstance(tensor, nn.Parameter):
        given: tuple[Any, ...] = tensor.data, tensor.requires_grad, OrderedDict()
        if not attributes:
            return torch._utils._rebuild_parameter, given
        return torch._utils._rebuild_parameter_with_state, (*given, attributes)
    if tensor.layout in SPARSE_LAYOUTS:
        coalesced = (tensor.is_coalesced(),) if tensor.layout is torch.sparse_coo else ()
        parts = map(keep_class, parts_of(tensor))
        return torch._utils._rebuild_sparse_tensor, (tensor.layout, (*parts, tensor.size(), *coalesced))
    if device_of(tensor).type == "meta":
        return torch._utils._rebuild_meta_tensor_no_storage, (
            tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.requires_grad)
    storage = tensor.untyped_storage()
    assert isinstance(storage, MetaStorage)
    return read_tensor, (_hold(storage), tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride(),
                         tensor.requires_grad, attributes)


def read_storage(nbytes: int, location: str, contents: tuple[bytes, torch.dtype] | None) -> _CopiedStorage:
    """A storage of a file, on the device that it was on when it was saved, or where `torch.load` is asked to put it."""
    state = current()
    mapped = torch.serialization._serialization_tls.map_location
    space = AddressSpace() if state is None else state.space
    place = torch.device(location if state is None and mapped is None else "cpu")
    with without_modes():
        storage = new_storage(nbytes, place, space)
        if contents is not None:
            storage.known = Deferred(torch.frombuffer(bytearray(contents[0]), dtype=contents[1]))
    if place.type == "cpu" and (state is not None or mapped is not None):
        storage = torch.serialization._get_restore_location(mapped)(storage, location)
    return _CopiedStorage(storage)


def read_tensor(held: _CopiedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...],
                requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    with without_modes():
        result = tensor_on(held.storage, dtype, offset, size, stride)
    result.requires_grad_(requires_grad)
    result.__dict__.update(attributes)
    return result


def move_storage(original: Any, storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
    """``UntypedStorage.to`` under a mode, by which `torch.load` puts what it read on a device."""
    state, place = current(), indexed_device(device)
    assert state is not None
    if isinstance(storage, MetaStorage):
        return storage if storage.device == place else storage.copy_to(place)
    if place.type in ("cpu", "meta"):
        return original(storage, device=device, non_blocking=non_blocking)
    return fake_storage(state, storage, place)


def fake_storage(state: MetaState, real: torch.UntypedStorage, device: torch.device) -> MetaStorage:
    with without_modes():
        made = new_storage(real.nbytes(), device, state.space)
    made.origin = real
    return made


def own_storages(state: MetaState, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``set_``, by which files become tensors, with a fake storage in place of one with data."""
    return tuple(_own(state, a) if isinstance(a, torch.UntypedStorage) else a for a in args)


def _own(state: MetaState, storage: torch.UntypedStorage) -> MetaStorage:
    if isinstance(storage, MetaStorage):
        return storage
    if storage.device.type == "meta":
        return state.space.attach(torch.empty(0, device=META).set_(storage), META)
    found = vars(storage).get("_fake")  # one for all tensors that are made of it
    fake: MetaStorage | None = None if found is None else found()
    if fake is None:
        fake = fake_storage(state, storage, CPU)
        vars(storage)["_fake"] = weakref.ref(fake)
    return fake


MetaTensor.__deepcopy__ = deepcopy_tensor  # type: ignore[method-assign]
MetaTensor.__reduce_ex__ = reduce_tensor  # type: ignore[method-assign]
torch.serialization.add_safe_globals([read_storage, read_tensor])  # what `torch.load` may call with weights_only=True
