"""The old types of tensors (``torch.FloatTensor``, ``torch.cuda.HalfTensor``) and storages, for fake tensors."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.state import current, indexed_device, simulated_machine
from analyzer.meta.tensor import MetaTensor, device_of

from .replacement import Undo, answer, made_once, replace

_NAMES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
          "CharTensor", "ByteTensor", "BoolTensor")
"""Those of ``torch._tensor_classes`` whose tensors are dense."""


class _LegacyType(type):
    """What stands for such a type: C++ asks where a tensor really is (`Tensor_instancecheck` in
    torch/csrc/tensor/python_tensor.cpp), and makes none on a device that is not there.
    """

    original: Any
    kind: str  #: the type of the device

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, torch.Tensor) or current() is None and not isinstance(instance, MetaTensor):
            return isinstance(instance, cls.original)
        device = device_of(instance) if isinstance(instance, MetaTensor) else instance.device
        return (instance.layout is torch.strided and instance.dtype is cls.original.dtype
                and device.type == cls.kind)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of sizes, or of what a tensor is made of: legacy_tensor_generic_ctor_new, torch/csrc/utils/tensor_new.cpp."""
        if current() is None or cls.kind == "cpu" or cls.is_absent():
            return cls.original(*args, **kwargs)
        device = indexed_device(kwargs.get("device") or cls.kind)
        if len(args) != 1 or isinstance(args[0], (int, torch.Size)):
            return torch.empty(*args or (0,), dtype=cls.original.dtype, device=device)
        return torch.as_tensor(args[0], dtype=cls.original.dtype, device=device)

    def is_absent(cls) -> bool:
        """Whether torch's own error is the answer: this machine answers for itself, and has no such device."""
        return simulated_machine() is None and cls.kind == "cuda" and not torch.cuda.is_available()

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __repr__(cls) -> str:
        return repr(cls.original)


_stand_ins = {(owner, name): _LegacyType(name, (), {
    "__module__": owner.__name__, "original": getattr(owner, name), "kind": kind})
    for owner, kind in ((torch, "cpu"), (torch.cuda, "cuda")) for name in _NAMES}


def list_types() -> list[tuple[Any, str]]:
    """The modules of torch that have such types, and their names."""
    return list(_stand_ins)


@made_once
def legacy_replacements() -> Iterator[Undo]:
    for (owner, name), stand_in in _stand_ins.items():
        yield replace(owner, name, partial(_take, stand_in))
    yield answer(torch, "set_default_tensor_type", _set_default_type, passes_original=True)
    yield answer(torch, "is_storage", lambda original, value: type(value) is MetaStorage or original(value),
                 passes_original=True)


def _take(stand_in: _LegacyType, original: Any) -> _LegacyType:
    return stand_in


def _set_default_type(original: Any, kind: Any) -> None:
    if isinstance(kind, str):
        kind = next((one for (owner, name), one in _stand_ins.items() if kind == f"{owner.__name__}.{name}"), kind)
    if not isinstance(kind, _LegacyType) or kind.is_absent():
        original(kind.original if isinstance(kind, _LegacyType) else kind)
        return
    indexed_device(kind.kind)
    torch.set_default_dtype(kind.original.dtype)
    torch.set_default_device(None if kind.kind == "cpu" else kind.kind)
