"""Triton's FlashAttention, which MPT trained with, as an operator that takes as long as what it says it is near.

The kernel is ``flash_attn/flash_attn_triton.py`` of HazyResearch's flash-attention, which
``llmfoundry/models/layers/flash_attn_triton.py`` copies. Of itself it says: "Overall Triton forward + backward is
slightly slower than CUDA forward + backward". So it takes as long as the CUDA kernels of that time, the first
FlashAttention, whose rates are printed in FlashAttention-2 (Dao, 2023; figures 4 and 7, the latter for an H100, are
``assets/flash2_a100_fwd_bwd_benchmark.png`` and ``flash2_h100_fwd_bwd_benchmark.png`` of Dao-AILab/flash-attention):
forward and backward together, causal, 16,384 tokens. Both passes are taken to run at the one rate; shorter sequences as
those of 512, and longer ones as those of 16,384. The bars named "FlashAttention Triton" there are OpenAI's kernel.
"""
from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature
from benchmarks.megatron_op import define, run

Tensor = torch.Tensor
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: By size of a head, at each of `LENGTHS`: 10^12 FLOPs a second, half of the square counted.
A100 = {64: (58, 70, 77, 87, 92, 97), 128: (55, 62, 69, 76, 80, 83)}
H100 = {64: (104, 123, 136, 138, 149, 156), 128: (98, 109, 108, 126, 135, 137)}
_SPREAD = 0.3  # assumed: of a figure's bars, for other batches and heads


def interpolate(rates: Sequence[float], length: int) -> float:
    """The rate at a length, on straight lines between those of `LENGTHS`.

    >>> interpolate(A100[64], 768), interpolate(A100[64], 65536)
    (64.0, 97.0)
    """
    length = min(max(length, LENGTHS[0]), LENGTHS[-1])
    after = max(1, bisect.bisect_left(LENGTHS, length))
    low, high = LENGTHS[after - 1], LENGTHS[after]
    return rates[after - 1] + (rates[after] - rates[after - 1]) * (length - low) / (high - low)


def find_rate(head_dim: int, length: int, device: DeviceSpec) -> float:
    """FLOPs a second of causal attention on A100 or H100."""
    return 1e12 * interpolate((H100 if device.architecture == "Hopper" else A100)[head_dim], length)


def _time(signature: Signature, device: DeviceSpec, products: int) -> KernelTime:
    batch, length, heads, head_dim = signature.inputs[0]
    flops = products * batch * heads * length * length * head_dim  # of 2 x a product, half of the square
    return KernelTime(flops / find_rate(head_dim, length, device), _SPREAD, "arithmetic", 1 if products == 2 else 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return torch.empty_like(q), torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
                     ) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# the forward kernel, of two products, and the backward ones, of five
attend_op = define("flash_triton::attend", _attend, functools.partial(_time, products=2))
attend_backward_op = define("flash_triton::attend_backward", _attend_backward, functools.partial(_time, products=5))


class TritonAttention(torch.autograd.Function):
    """FlashAttnFunc."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = attend_op(q, k, v)
        ctx.save_for_backward(q, k, v, out, sums)
        attended: Tensor = out
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return attend_backward_op(grad.contiguous(), *ctx.saved_tensors)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of tensors [batch, length, heads, size of a head]."""
    return run(TritonAttention, q, k, v)
