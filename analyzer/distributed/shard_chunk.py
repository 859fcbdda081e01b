"""Private torch API: the parts that FSDP cuts a parameter into, of which one rank looks at two or three."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import current_world


class Chunks(Sequence[torch.Tensor]):
    """What ``torch.chunk(tensor, count, dim)`` gives, padded to ``count`` with empty tensors; each is made when it is
    read: there are as many as ranks.
    """

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._step = -(-tensor.size(dim) // count)  # ATen/native/TensorShape.cpp, ``chunk``

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        start, size = index % self._count * self._step, self._tensor.size(self._dim)
        if start >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._step, size - start))


def replacements() -> Iterator[Undo]:
    """How a parameter is cut; each result undoes one replacement."""
    yield answer(fsdp_param, "_chunk_with_empty", Chunks, where=current_world)
