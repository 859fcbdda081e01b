"""What lists of tensors are, for operators that get the same lists again and again, as an optimizer's do."""
from __future__ import annotations

import operator
import weakref
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage

_WORTH = 8      # tensors in a list: shorter ones are looked at as fast
_MOST = 1 << 12  # kinds of lists; a process that meets more starts over, to bound memory
_call = weakref.ref.__call__
_storage_of = torch.Tensor.untyped_storage


class ListKind:
    """Stands for the shapes, strides, dtypes and devices of a list of tensors: the same object for the same."""

    __slots__ = ()


_kinds: dict[tuple[Any, ...], ListKind] = {}


class ListMemo:
    """Lists that were looked at, while their tensors live and none changes its shape, storage or device."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[list[weakref.ref[torch.Tensor]], ListKind]] = {}

    def take(self, given: Any, tensors: list[torch.Tensor], storages: list[MetaStorage]) -> ListKind | None:
        """Add a list's tensors and storages to these; its kind, None where it is short or not all the mode's own."""
        if len(given) < _WORTH:
            return None
        ids = tuple(map(id, given))
        found = self._found.get(ids)
        if found is None or not all(map(operator.is_, map(_call, found[0]), given)):
            kind = _kind_of(given)
            if kind is None:
                return None
            found = self._found[ids] = list(map(weakref.ref, given)), kind
        tensors += given
        storages += map(_storage_of, given)  # type: ignore[arg-type]  # `_kind_of` looked
        return found[1]


def _kind_of(given: Any) -> ListKind | None:
    contents: list[Any] = []
    for tensor in given:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if type(storage) is not MetaStorage:
            return None
        contents += tensor.shape, tensor.stride(), tensor.dtype, storage.device
    if len(_kinds) >= _MOST:
        _kinds.clear()
    return _kinds.setdefault(tuple(contents), ListKind())
