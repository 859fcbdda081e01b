"""Private torch API: which autograd node runs, and who holds a tensor."""
from __future__ import annotations

import sys
from typing import Any

import torch

from analyzer.meta.tensor import name_of_node

next_sequence_number = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node made in this thread will get: a node made just now has one less."""


def current_backward_node() -> tuple[int, torch.Tensor | None] | None:
    """(sequence number, leaf) of the node that the engine runs; the leaf where the node accumulates its gradient."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    variable = getattr(node, "variable", None) if name_of_node(node) == "torch::autograd::AccumulateGrad" else None
    return node._sequence_nr(), variable


class ReferenceCount:
    """Counts of references to a tensor that the caller keeps, since `start`: more after a forward pass tell that
    autograd saved it (a saved variable shares the tensor or its storage, checkpointing keeps the object).
    """

    __slots__ = ("tensor", "_before")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._before = (0, 0, 0)

    def start(self) -> None:
        """Count the references that there are now."""
        self._before = _count_references(self.tensor)

    def has_grown(self) -> bool:
        return any(now > before for now, before in zip(_count_references(self.tensor), self._before))


def _count_references(tensor: Any) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)
