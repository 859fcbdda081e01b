"""The ends of a block that is tried alone: autograd nodes that make its inputs and give its outputs gradients."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.meta.state import active_state
from analyzer.record.reference_count import ALONE, ALONE_VIEW

from .captured_block import number_of


class Source(torch.autograd.Function):
    """Makes the inputs, which autograd then owns as it owns an earlier block's outputs; collects their gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, capture: Any, make: Callable[[], list[torch.Tensor]]) -> Any:
        """Give what ``make`` makes."""
        ctx.capture = capture
        tensors = make()
        ctx.mark_non_differentiable(*[t for t, needs in zip(tensors, capture.needs_grad) if not needs])
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Keep the gradients of the inputs."""
        ctx.capture.returned = list(grads)
        return None, None, None


class Sink(torch.autograd.Function):
    """Takes the outputs; its backward gives each a fresh gradient that autograd alone owns."""

    @staticmethod
    def forward(ctx: Any, capture: Any, *outputs: torch.Tensor) -> torch.Tensor:
        """Give a tensor whose backward pass starts the block's; it is where a loss would be, for autograd's nodes make
        tensors there.
        """
        ctx.capture = capture
        return active_state().call_on(capture.claim, torch.empty, 0)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make the gradients of the outputs."""
        made = [None if s is None else _make_gradient(s, ctx.capture.claim) for s in ctx.capture.grad_specs]
        ctx.capture.kept = [g for g, s in zip(made, ctx.capture.grad_specs)
                          if s is not None and s[3] not in (ALONE, ALONE_VIEW)]
        ctx.capture.incoming = [None if g is None else number_of(g) for g in made]
        ctx.capture.start_backward()
        return (None, *made)


def _make_gradient(spec: Any, claim: torch.device) -> torch.Tensor:
    shape, stride, dtype, holding = spec
    made = torch.empty_strided(shape, stride, dtype=dtype, device=claim)
    return made.as_strided(shape, stride) if holding is ALONE_VIEW else made
