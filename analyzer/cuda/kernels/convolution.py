"""Layouts of what convolutions and their gradients give: channels last where the images or the weights are and the
backend runs so, which torch's meta kernels cannot know (``determine_backend_memory_format`` in Convolution.cpp and the
functions of ConvUtils.h that it asks).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape, host_shape
from analyzer.cuda.workspaces.convolution import either_is_channels_last, suggests_channels_last
from analyzer.cuda.workspaces.host_kernel import uses_onednn
from analyzer.meta.spec import TensorSpec, spec_of

Tensor = torch.Tensor
_aten = torch.ops.aten
_Rule = Callable[[TensorSpec, TensorSpec, "list[int]", "list[int]", int], bool]
"""Whether a convolution of images and weights with these strides, dilations and groups is run channels last."""


def _on_device(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    return torch.backends.cudnn.enabled and suggests_channels_last(x, w)


def _on_host(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Volumes only in oneDNN, and there in no float64; images in the other kernels as well."""
    return either_is_channels_last(x, w) and (len(w) == 4 or uses_onednn(x, w, stride, dilation, groups))


def _lay_out(result: Tensor, input: Tensor, weight: Tensor, rule: _Rule, *settings: Any) -> Tensor:
    """``result`` as the backend lays it out; one dimension is run as two, of a contiguous input (view4d)."""
    if result.dim() == 3:
        input, weight = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
        return _lay_out(result.unsqueeze(2), input, weight, rule, *settings).squeeze(2)
    last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    is_last = rule(spec_of(input), spec_of(weight), *settings)
    return torch.empty_like(result, memory_format=last if is_last else torch.contiguous_format)


def _convolution(rule: _Rule) -> Callable[..., Tensor]:
    def shape(input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
              dilation: list[int], *rest: Any) -> Tensor:
        out = _aten.convolution.default(input, weight, bias, stride, padding, dilation, *rest)
        return _lay_out(out, input, weight, rule, stride, dilation, rest[-1])
    return shape


def _gradients(rule: _Rule) -> Callable[..., Any]:
    """Of the input and the weight; that of the bias has one dimension."""
    def shape(gradient: Tensor, input: Tensor, weight: Tensor, *args: Any) -> Any:
        *found, of_bias = _aten.convolution_backward.default(gradient, input, weight, *args)
        _, stride, _, dilation, _, _, groups, _ = args
        return (*(None if one is None else _lay_out(one, input, weight, rule, stride, dilation, groups)
                  for one in found), of_bias)
    return shape


device_shape("convolution")(_convolution(_on_device))
host_shape("convolution")(_convolution(_on_host))
device_shape("convolution_backward")(_gradients(_on_device))
host_shape("convolution_backward")(_gradients(_on_host))
