"""What is known of the contents of tensors, by their storages."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.storage import MetaStorage

from .known_value import LARGEST_INTEGER, Call, ReadArgument, Zeros, window_of

Tensor = torch.Tensor


def worth_following(numel: int) -> bool:
    """Whether contents of this size that a factory or known arguments give are worth an expression."""
    return numel <= LARGEST_INTEGER


def storage_numel(storage: MetaStorage, dtype: torch.dtype) -> int:
    """How many elements of ``dtype`` fill ``storage``."""
    return storage.nbytes() // dtype.itemsize


def covers_storage(tensor: Tensor, storage: MetaStorage) -> bool:
    """Whether writing every element of ``tensor`` writes every element of its storage."""
    return tensor.numel() * tensor.itemsize == storage.nbytes() and not any(s == 0 for s in tensor.stride())


def read_known(tensor: Tensor, assumed: bool = False) -> Tensor | None:
    """The value of ``tensor`` as a tensor on CPU (not to be written), or None where it does not follow from a factory.
    With ``assumed``, also where something unknown was taken as zero on the way.
    """
    storage = tensor.untyped_storage()
    known = None if not isinstance(storage, MetaStorage) else storage.known if assumed else storage.exact
    if known is None:
        return None
    with without_modes():
        flat = known.work_out()
        if flat.dtype != tensor.dtype:
            if (flat.numel() * flat.itemsize) % tensor.itemsize:
                return None
            flat = flat.view(tensor.dtype)
        return flat.as_strided(*window_of(tensor))


def defer_call(op: Any, args: Any, kwargs: Any, *, expects: bool = False,
               seed: int | None = None) -> tuple[Call, list[Tensor]]:
    """A call on known contents in place of tensors, and those tensors that have none; with ``expects``, zeros are taken
    for what is not known.
    """
    reads: list[ReadArgument] = []
    unknown: list[Tensor] = []
    call = Call(op, _defer(args, reads, unknown, expects), _defer(kwargs, reads, unknown, expects), reads, seed)
    return call, unknown


_DEFERRED = (Tensor, list, tuple, dict)


def _defer(tree: Any, reads: list[ReadArgument], unknown: list[Tensor], expects: bool) -> Any:
    if isinstance(tree, Tensor):
        storage = tree.untyped_storage() if tree.layout is torch.strided else None
        known = storage.known if isinstance(storage, MetaStorage) else None
        if known is None and expects and isinstance(storage, MetaStorage):
            numel = storage_numel(storage, tree.dtype)
            known = Zeros(numel, tree.dtype) if worth_following(numel) else None
        if known is None:
            unknown.append(tree)
            return None
        reads.append(ReadArgument(known, window_of(tree)))
        return reads[-1]
    if isinstance(tree, (list, tuple)):
        return [_defer(x, reads, unknown, expects) if isinstance(x, _DEFERRED) else x for x in tree]
    if isinstance(tree, dict):
        return {k: _defer(v, reads, unknown, expects) if isinstance(v, _DEFERRED) else v for k, v in tree.items()}
    return tree
