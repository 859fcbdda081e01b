"""Convolutions. Each output element (each input element, where transposed) meets one filter of `weight[1:]` elements,
which already holds channels divided by groups. A bias adds nothing, as in torch.utils.flop_counter.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, Formula, register_each
from .size import multiply_adds


def convolution_macs(x: Spec, weight: Spec, out: Spec, transposed: bool) -> int:
    """Multiply-adds of x [n, c_in, ...], weight [c_out, c_in/groups, ...] (transposed: [c_in, c_out/groups, ...])."""
    return (x.numel if transposed else out.numel) * prod(weight[1:])


def forward_convolution_flops(x: Spec, weight: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """FLOPs of ``conv1d``, ``conv2d`` and their variants."""
    return multiply_adds(convolution_macs(x, weight, out, False), x)


def transposed_convolution_flops(x: Spec, weight: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """>>> import torch
    >>> spec = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> transposed_convolution_flops(spec(1, 8, 5, 5), spec(8, 1, 3, 3)).macs  # depthwise: 200 inputs, 9 taps each
    1800
    """
    return multiply_adds(convolution_macs(x, weight, x, True), x)


def backward(grad: Spec, x: Spec, weight: Spec, transposed: bool, output_mask: Sequence[bool]) -> FlopCount:
    """The gradients of input and of weight pair the same triples (input, tap, output) as the forward: its count."""
    wanted = bool(output_mask[0]) + bool(output_mask[1])
    return multiply_adds(wanted * convolution_macs(x, weight, grad, transposed), x)


def backward_of(transposed_at: int) -> Formula:
    """The formula of a backward kernel: ``transposed`` is argument ``transposed_at``, the output mask three later."""
    return lambda grad, x, weight, *rest, **__: backward(
        grad, x, weight, rest[transposed_at - 3], rest[transposed_at])


register_each("convolution _convolution convolution_overrideable",
    lambda x, weight, bias, stride, padding, dilation, transposed=False, *_, out, **__: (
        multiply_adds(convolution_macs(x, weight, out, transposed), x)))
register_each(
    "conv1d conv2d conv3d cudnn_convolution mkldnn_convolution miopen_convolution miopen_depthwise_convolution "
    "_mps_convolution _nnpack_spatial_convolution _slow_conv2d_forward slow_conv3d_forward slow_conv3d thnn_conv2d "
    "slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d conv_depthwise3d", forward_convolution_flops)
register_each(
    "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose "
    "_mps_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d", transposed_convolution_flops)
register_each("cudnn_convolution_relu miopen_convolution_relu",
    lambda x, weight, *_, out, **__: forward_convolution_flops(x, weight, out=out) + FlopCount(out.numel))
# relu(conv + alpha * z): the scale, the sum and the ReLU are 3 FLOPs an output element
register_each("cudnn_convolution_add_relu miopen_convolution_add_relu",
    lambda x, weight, *_, out, **__: forward_convolution_flops(x, weight, out=out) + FlopCount(3 * out.numel))
register_each("convolution_backward", backward_of(transposed_at=7))
register_each("convolution_backward_overrideable", backward_of(transposed_at=6))
register_each("mps_convolution_backward",
    lambda x, grad, weight, *rest, **__: backward(grad, x, weight, False, rest[-1]))
register_each("mps_convolution_transpose_backward",
    lambda x, grad, weight, *rest, **__: backward(grad, x, weight, True, rest[-1]))
# The .grad_input overload has no mask and fills all three
register_each("_slow_conv2d_backward",
    lambda grad, x, weight, kernel_size, stride, padding, output_mask=(True, True, True), *_, **__: (
        backward(grad, x, weight, False, output_mask)))
# x [time, n, c_in], weight [taps, c_in, c_out], out [time, n, c_out]
register_each("conv_tbc", lambda x, weight, *_, out, **__: multiply_adds(out.numel * weight[0] * weight[1], x))
register_each("conv_tbc_backward",
    lambda grad, x, weight, *_, **__: multiply_adds(2 * grad.numel * weight[0] * weight[1], x))
