"""Private torch API: which autograd node runs, and who holds a tensor."""
from __future__ import annotations

import enum
import sys
from typing import Any

import torch

from analyzer.meta.mode import MetaTensorMode
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


def describe_context() -> tuple[object, ...]:
    """What torch's settings say about how operators run now: autocast, modes, hooks, kernels that may be chosen."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (nesting, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"),
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,  # as checkpointing has, offloading
            torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(), torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled)


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


class Holding(enum.Enum):
    """Who holds a gradient that an autograd node was just given."""

    ALONE = "autograd alone"
    ALONE_VIEW = "autograd alone, as a view"
    SHARED = "others too"


ALONE, ALONE_VIEW, SHARED = Holding


def find_holdings(gradients: tuple[torch.Tensor | None, ...]) -> list[Holding | None]:
    """Who holds each of the gradients that ``Function.backward`` was given; to be asked there, of that tuple."""
    return [None if counts is None else _counts_of.get(counts, SHARED) for counts in _count(gradients)]


def _count(gradients: tuple[torch.Tensor | None, ...]) -> list[tuple[int, ...] | None]:
    return [None if gradient is None else _count_one(gradient) for gradient in gradients]


def _count_one(gradient: Any) -> tuple[int, ...]:
    counts = _count_references(gradient)
    return (*counts, gradient._base._use_count()) if gradient._is_view() else counts


_counts_of: dict[tuple[int, ...], Holding] = {}  # as `learn_holdings` found them


def learn_holdings() -> bool:
    """Measure once how the holders of a gradient are counted; False where counts do not tell them apart."""
    if not _counts_of:
        with MetaTensorMode():
            _counts_of.update([(_measure(holding), holding) for holding in Holding])
    return len(_counts_of) == len(Holding)


def _measure(holding: Holding) -> tuple[int, ...]:
    found: list[tuple[int, ...]] = []
    kept: list[torch.Tensor] = []

    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Receives(Copies):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> None:
            found.extend(counts for counts in _count(grads) if counts is not None)

    class Gives(Copies):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided((2, 2), (2, 1))
            if holding is SHARED:
                kept.append(made)
            return made.as_strided((2, 2), (2, 1)) if holding is ALONE_VIEW else made

    with torch.inference_mode(False), torch.enable_grad():
        received = Receives.apply(torch.empty(2, 2, requires_grad=True))  # type: ignore[no-untyped-call]
        out: torch.Tensor = Gives.apply(received)  # type: ignore[no-untyped-call]
        del received
        out.backward(torch.empty(2, 2))
    return found[0]
