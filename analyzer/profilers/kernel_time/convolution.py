"""Time of the operators that are convolutions: which ways they compute, and what runs beside cuDNN's kernels."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.memory_bound import stream_time
from analyzer.hardware.kernel_time.pointwise import pointwise_time
from analyzer.hardware.kernel_time.reduction import reduction_time
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec

from .placement import per_dimension
from .precision import convolutions_use_tf32
from .registry import register_time_impl

_COLUMNS = ("aten::_slow_conv2d_forward", "aten::thnn_conv2d", "aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d",
            "aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d")
_FORWARD = ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution",
            "aten::cudnn_convolution_transpose", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu",
            "aten::_conv_depthwise2d", "aten::conv_depthwise3d", *_COLUMNS)
_BACKWARD = ("aten::convolution_backward", "aten::convolution_backward_overrideable", "aten::_slow_conv2d_backward")


def _images(arguments: Mapping[str, Any]) -> TensorSpec:
    spec: TensorSpec = arguments["input"] if "input" in arguments else arguments["self"]
    return spec


def _is_channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of an image or a volume lie beside each other, as ``suggest_memory_format`` tells it."""
    return len(spec) in (4, 5) and spec.stride[1] == 1 and spec.stride[-1] >= spec[1] and math.prod(spec[1:]) > 1


def _convolve(way: str, x: TensorSpec, y: TensorSpec, w: TensorSpec, arguments: Mapping[str, Any], transposed: bool,
              device: DeviceSpec) -> KernelTime | None:
    """One way of a convolution of ``x`` to ``y``, and the copies that PyTorch makes of tensors in another order."""
    dims = len(x) - 2
    channels_last = x.dtype != torch.float64 and (_is_channels_last(x) or _is_channels_last(w))
    allow_tf32 = arguments.get("allow_tf32")
    time = convolution_time(
        way, x[0], x[1], y[1], x[2:], y[2:], w[2:], arguments.get("groups", x[1] if w[1] == 1 else 1),
        str(x.dtype).removeprefix("torch."), device, stride=per_dimension(arguments.get("stride"), dims),
        dilation=per_dimension(arguments.get("dilation"), dims),
        allow_tf32=convolutions_use_tf32() if allow_tf32 is None else allow_tf32,
        channels_last=channels_last, transposed=transposed)
    read = {"forward": (x, w), "input": (y, w), "weight": (x, y)}[way]
    copied = [spec for spec in read if len(spec) in (4, 5) and channels_last != _is_channels_last(spec)
              and _pixels(spec) > 1 and spec[1] > 1]
    return join_known(time, *(stream_time(2 * spec.nbytes, device) for spec in copied))


def _pixels(spec: TensorSpec) -> int:
    return spec.numel // (spec[0] * spec[1]) if spec.numel else 0


def time_forward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A convolution; a bias is added by a kernel of its own, except by PyTorch's depthwise kernels and fused ones."""
    name = signature.op._schema.name
    arguments = signature.named_arguments()
    x, w, y = _images(arguments), arguments["weight"], signature.outputs[0]
    transposed = bool(arguments.get("transposed", "transpose" in name))
    time = _convolve("forward", x, y, w, arguments, transposed, device)
    groups = arguments.get("groups", 1)
    if arguments.get("bias") is not None and "depthwise" not in name and "relu" not in name and groups != x[1]:
        bias = pointwise_time(y.numel, 2 * y.nbytes, device, dimensions=3, operands=3)  # a value a channel
        time = join_known(time, bias)
    if name in _COLUMNS:  # im2col before the product, or col2im after it
        columns = (x if transposed else y).numel // (x if transposed else y)[1] * w.numel // w[0]
        time = join_known(time, stream_time(2 * columns * x.dtype.itemsize, device))
    return time


def time_backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The gradients that are asked for: each is a convolution, that of the bias a sum."""
    arguments = signature.named_arguments()
    x, w, y = _images(arguments), arguments["weight"], arguments["grad_output"]
    transposed = bool(arguments.get("transposed", False))
    wants_input, wants_weight, wants_bias = arguments["output_mask"]
    times = [_convolve(way, x, y, w, arguments, transposed, device)
             for way, is_wanted in (("input", wants_input), ("weight", wants_weight)) if is_wanted]
    if wants_bias:
        channels = y[1]
        times.append(reduction_time(channels, y.numel // max(1, channels), y.dtype.itemsize, device,
                                    reduces_fastest=not _is_channels_last(y)))
    return join_known(*times)


for _name in _FORWARD:
    register_time_impl(_name, time_forward)
for _name in _BACKWARD:
    register_time_impl(_name, time_backward)
