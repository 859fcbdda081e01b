"""How long convolutions and their gradients take on a device: the kernels of cuDNN, and PyTorch's depthwise ones.

On CUDA cores (float32 without TF32, and float64) cuDNN has implicit products and, for 3x3, Winograd's two algorithms;
the fastest counts, as cuDNN's heuristics or its benchmark choose it. On tensor cores (16 bit, or float32 with TF32,
PyTorch's default for convolutions) it has implicit products of channels-last tensors.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

from analyzer.errors import InputError
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.roofline import find_peak

from .constants import find_constants
from .convolution_depthwise import depthwise_seconds
from .convolution_shape import ConvolutionShape, make_shape
from .convolution_tensor import sum_seconds, tensor_seconds
from .convolution_tile import CUDA_CORE_TILES, product_seconds, split_product_seconds
from .convolution_winograd import fits_winograd, fused_seconds, nonfused_seconds
from .estimate import NO_TIME, KernelTime

WAYS = ("forward", "input", "weight")
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def convolution_time(way: str, batch: int, in_channels: int, out_channels: int, in_size: tuple[int, ...],
                     out_size: tuple[int, ...], kernel_size: tuple[int, ...], groups: int, dtype: str,
                     device: DeviceSpec, *, stride: tuple[int, ...], dilation: tuple[int, ...], allow_tf32: bool,
                     channels_last: bool, transposed: bool = False) -> KernelTime | None:
    """Time of one way of a convolution: ``"forward"``, or the gradient of its ``"input"`` or ``"weight"``.

    Sizes are those of the images that go in and of the results that come out, without batch and channels; ``dtype`` is
    a name such as ``"float32"``. ``channels_last``: whether tensors lie so, as tensor cores want them. None where a
    figure of the device is unknown, or it is no CUDA device. Raises InputError for an unknown ``way``.

    >>> from analyzer.hardware import find_device
    >>> layer = dict(stride=(1, 1), dilation=(1, 1), channels_last=False)
    >>> sizes = (64, 256, 256, (14, 14), (14, 14), (3, 3), 1)
    >>> tf32 = convolution_time("forward", *sizes, "float32", find_device("h200"), allow_tf32=True, **layer)
    >>> fp32 = convolution_time("forward", *sizes, "float32", find_device("h200"), allow_tf32=False, **layer)
    >>> tf32.seconds < fp32.seconds, tf32.kernels  # the product, and the copies of input, weight and output
    (True, 4)
    """
    if way not in WAYS:
        raise InputError(f"convolution_time({way!r}): must be one of {', '.join(map(repr, WAYS))}")
    item_bytes = _ITEM_BYTES.get(dtype)
    peak = device.flops_per_second.fp32 if dtype != "float64" else device.flops_per_second.fp64
    if (item_bytes is None or peak is None or device.kind != "cuda" or device.memory_bandwidth is None
            or device.multiprocessors is None):
        return None
    if transposed:  # the input gradient of the convolution that goes the other way
        way = {"forward": "input", "input": "forward", "weight": "weight"}[way]
        in_channels, out_channels, in_size, out_size = out_channels, in_channels, out_size, in_size
    shape = make_shape(way, batch, in_channels, out_channels, in_size, out_size, kernel_size, groups, item_bytes,
                       stride, dilation)
    if not all(shape.sizes):
        return NO_TIME
    c = find_constants("convolution", device)
    tensor_peak = find_peak(dtype, device, uses_tensor_cores=True, allow_tf32=allow_tf32) or peak
    if groups > 1 and groups == in_channels and not transposed:
        by_instructions, memory = depthwise_seconds(shape, c, device)
        return _estimate(by_instructions, memory, c["kernel_seconds"], 1, c["depthwise_spread"])
    if tensor_peak <= peak or dtype == "float64":
        return _cuda_core_time(shape, peak, c, device)
    arithmetic, memory, fixed, kernels = tensor_seconds(shape, tensor_peak, c, device, channels_last)
    time = _estimate(arithmetic, memory, fixed, kernels, c["tensor_spread"])
    if dtype != "float32" or fixed < max(arithmetic, memory):
        return time
    # copies cost more than the product: a kernel without them may cost less
    return min(time, _cuda_core_time(shape, peak, c, device), key=lambda each: each.seconds)


def _cuda_core_time(shape: ConvolutionShape, peak: float, c: Mapping[str, float], device: DeviceSpec) -> KernelTime:
    """The fastest algorithm on CUDA cores."""
    assert device.memory_bandwidth is not None
    rows, columns, depth = shape.product
    rate, bandwidth = peak * c["cuda_core_efficiency"], device.memory_bandwidth * c["memory_efficiency"]
    memory, fixed, kernels = shape.item_bytes * sum(shape.sizes) / bandwidth, c["kernel_seconds"], 1
    if shape.way == "weight":
        arithmetic, partial = split_product_seconds(rows, columns, depth, shape.groups, rate, c, "cuda_core", device,
                                                    CUDA_CORE_TILES)
        if partial:
            fixed, kernels = fixed + partial / bandwidth + c["kernel_seconds"], 2
    else:
        arithmetic = product_seconds(rows, columns, depth, shape.groups, rate, c, "cuda_core", device, CUDA_CORE_TILES)
    time = _estimate(arithmetic, memory, fixed, kernels, c["spread"])
    if fits_winograd(shape):
        for seconds, launched in ((nonfused_seconds(shape, peak, c, device), 4),
                                  (fused_seconds(shape, peak, c, device) if shape.way != "weight" else math.inf, 2)):
            if seconds < time.seconds:
                time = KernelTime(seconds, c["spread"], "arithmetic", launched)
    return time


def _estimate(arithmetic: float, memory: float, fixed: float, kernels: int, spread: float) -> KernelTime:
    seconds = sum_seconds(arithmetic, memory, fixed)
    bound = "latency" if fixed > max(arithmetic, memory) and seconds < 2 * fixed and kernels == 1 else (
        "arithmetic" if arithmetic > memory else "memory")
    return KernelTime(seconds, spread, bound, kernels)
