"""Normalisation of groups on the CPU, which keeps a layout that other devices make contiguous. Source:
``aten/src/ATen/native/group_norm.cpp``.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from analyzer.cuda.kernel_registry import call_whole, host_kernel

Tensor = torch.Tensor
aten = torch.ops.aten


@host_kernel("group_norm")
def _normalize_groups(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
                      eps: float = 1e-5, cudnn_enabled: bool = True) -> Any:
    """The kernel for an input that is channels last, which stays so."""
    layout = suggest_memory_format(input)
    if layout is torch.contiguous_format or num_groups <= 0 or input.shape[1] % num_groups:
        return NotImplemented
    batch, channels, *rest = input.shape
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    return ChannelsLastGroupNorm.apply(input.contiguous(memory_format=layout), weight, bias,
                                       (batch, channels, math.prod(rest), num_groups), eps, layout)


class ChannelsLastGroupNorm(torch.autograd.Function):
    """``aten::native_group_norm``: autograd's own formula (tools/autograd/derivatives.yaml) makes both arguments of the
    backward pass contiguous on every device but the CPU.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: tuple[int, ...], eps: float,
                layout: torch.memory_format) -> Tensor:
        """Run the kernel and keep what its backward pass needs."""
        out, mean, rstd = call_whole(aten.native_group_norm.default, input, weight, bias, *sizes, eps)
        ctx.sizes, ctx.layout = sizes, layout
        ctx.save_for_backward(input, weight, mean, rstd)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the inputs."""
        input, weight, mean, rstd = ctx.saved_tensors
        gradient = grads[0].contiguous(memory_format=ctx.layout)
        return *call_whole(aten.native_group_norm_backward.default, gradient, input, mean, rstd, weight, *ctx.sizes,
                           list(ctx.needs_input_grad[:3])), None, None, None
