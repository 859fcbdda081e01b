"""The fused kernels of Megatron-LM as operators: causal softmax, bias with GELU, bias with dropout and residual.

Each is one kernel forward and one backward (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h,
megatron/model/fused_bias_gelu.py, ``bias_dropout_add_fused_train`` of megatron/model/transformer.py, of 2021 to 2023);
its time is that of what it reads and writes.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer import register_time_impl
from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.hardware.kernel_time.pointwise import random_time, stream_time
from analyzer.meta.spec import Signature

Tensor = torch.Tensor


def stream_signature(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    return stream_time(sum(spec.nbytes for spec in (*signature.inputs, *signature.outputs)), device)


def _triangle(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Reads the keys that a query sees, half of a square, and writes all of it."""
    read = sum(spec.nbytes for spec in signature.inputs) / 2
    return stream_time(read + sum(spec.nbytes for spec in signature.outputs), device)


def _random(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    nbytes = sum(spec.nbytes for spec in (*signature.inputs, *signature.outputs))
    return random_time(signature.outputs[0].numel, nbytes, device)


def define(name: str, fake: Any, rule: Any) -> Any:
    """An operator of ``fake``'s signature, which makes its outputs alone, with the time of ``rule``."""
    made = torch.library.custom_op(name, fake, mutates_args=())
    made.register_fake(fake)
    register_time_impl(name)(rule)
    return made


def _causal_softmax(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


def _causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    return torch.empty_like(grad)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad)


causal_softmax_op = define("megatron::causal_softmax", _causal_softmax, _triangle)
causal_softmax_backward_op = define("megatron::causal_softmax_backward", _causal_softmax_backward, _triangle)
bias_gelu_op = define("megatron::bias_gelu", _bias_gelu, stream_signature)
bias_gelu_backward_op = define("megatron::bias_gelu_backward", _bias_gelu_backward, stream_signature)
bias_dropout_add_op = define("megatron::bias_dropout_add", _bias_dropout_add, _random)
dropout_backward_op = define("megatron::dropout_backward", _dropout_backward, stream_signature)


def run(function: Any, *inputs: Any) -> Tensor:  # ``function.apply``, which torch does not annotate
    out: Tensor = function.apply(*inputs)
    return out


class CausalSoftmax(torch.autograd.Function):  # ``ScaledUpperTriangMaskedSoftmax``
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        out: Tensor = causal_softmax_op(scores, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return causal_softmax_backward_op(grad, *ctx.saved_tensors, ctx.scale), None


class BiasGelu(torch.autograd.Function):
    """``GeLUFunction``: its backward gives one tensor for both inputs, which autograd sums for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        out: Tensor = bias_gelu_op(x, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = bias_gelu_backward_op(grad, *ctx.saved_tensors)
        return out, out.sum((0, 1))


class BiasDropoutAdd(torch.autograd.Function):  # ``bias_dropout_add_fused_train``
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
        out: Tensor
        out, mask = bias_dropout_add_op(x, bias, residual, p)
        ctx.save_for_backward(mask)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = dropout_backward_op(grad, *ctx.saved_tensors, ctx.p)
        return out, out.sum((0, 1)), grad, None
