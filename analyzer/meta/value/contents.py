"""What is known of the contents of a tensor, by its storage."""
from __future__ import annotations

import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.storage import MetaStorage

from .known_value import LARGEST_INTEGER, window_of


def worth_following(numel: int) -> bool:
    """Whether contents of this size that a factory or known arguments give are worth an expression."""
    return numel <= LARGEST_INTEGER


def covers_storage(tensor: torch.Tensor, storage: MetaStorage) -> bool:
    """Whether writing every element of ``tensor`` writes every element of its storage."""
    return tensor.numel() * tensor.itemsize == storage.nbytes() and not any(s == 0 for s in tensor.stride())


def read_known(tensor: torch.Tensor, assumed: bool = False) -> torch.Tensor | None:
    """The value of ``tensor`` as a tensor on CPU (not to be written), or None where it does not follow from a factory.
    With ``assumed``, also where something unknown was taken as zero on the way.
    """
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage) or storage.known is None or storage.known.assumed and not assumed:
        return None
    with without_modes():
        flat = storage.known.work_out()
        if flat.dtype != tensor.dtype:
            if (flat.numel() * flat.itemsize) % tensor.itemsize:
                return None
            flat = flat.view(tensor.dtype)
        return flat.as_strided(*window_of(tensor))
