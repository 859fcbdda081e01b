"""Private torch API: which autograd node runs now, and how nodes are numbered."""
from __future__ import annotations

import torch

next_sequence_number = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node made in this thread will get: a node made just now has one less."""


def current_backward_node() -> tuple[int, torch.Tensor | None] | None:
    """(sequence number, leaf) of the node that the engine runs; the leaf where the node accumulates its gradient."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    variable = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
    return node._sequence_nr(), variable


def saves_are_hooked() -> bool:
    """Whether hooks are active that see every tensor autograd saves (checkpointing, offloading)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
