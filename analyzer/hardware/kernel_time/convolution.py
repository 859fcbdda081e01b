"""Time of convolutions, by the algorithm that cuDNN chooses."""
from __future__ import annotations

import math
from collections.abc import Mapping

from analyzer.errors import InputError
from analyzer.hardware.device_spec import DeviceSpec, find_peak

from .convolution_tile import (
    CUDA_CORE_TILES,
    SUM_BYTES,
    ConvolutionShape,
    make_shape,
    product_seconds,
    split_product_seconds,
    sum_seconds,
    tensor_seconds,
)
from .estimate import NO_TIME, KernelTime, find_constants
from .pointwise import CLOCK_HERTZ

# Winograd's algorithms for 3x3 convolutions (Lavin and Gray, CVPR 2016): transforms that save multiplications.

# cuDNN's fused kernel, winograd_128x128_ldg1_ldg4_tile148t and _tile442t: a block makes 32 channels of 32 squares of
# 2x2 results, in 1 image as 4 by 8 squares or in 4 images as 4 by 2; volta_scudnn_winograd has the first only.
_FUSED_CHANNELS = 32
_FUSED_SQUARES = ((1, 8, 16), (4, 8, 4))  # images, rows, columns of results
_ONE_SQUARE = ("Volta", "Turing")         # which run the kernels of Volta
_LANES = 64  # of a multiprocessor that its one block keeps busy as well as it can: with twice as many it takes as long
_FUSED_PRODUCTS = 16                      # of 4x4 inputs
# winograd_nonfused::winogradForward{Data,Filter,Output}4x4: 4x4 results from 6x6 inputs, a product for each of the 36
_SQUARE = 4
_PRODUCTS = 36


def fits_winograd(shape: ConvolutionShape) -> bool:
    """Whether cuDNN has these algorithms for it: images, 3x3, neither strides, dilation nor groups."""
    return (shape.kernel_size == (3, 3) and shape.steps == 1 and not shape.is_dilated and shape.groups == 1)


def fused_seconds(shape: ConvolutionShape, peak: float, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds of the two kernels that transform, multiply and transform back without leaving the multiprocessor."""
    assert device.multiprocessors is not None and device.memory_bandwidth is not None
    ins, outs, size = shape.in_channels, shape.out_channels, shape.out_size
    if shape.way == "input":
        ins, outs, size = outs, ins, shape.in_size
    squares = _FUSED_SQUARES[:1] if device.architecture in _ONE_SQUARE else _FUSED_SQUARES
    blocks = min(-(-shape.batch // images) * -(-size[0] // rows) * -(-size[1] // columns)
                 for images, rows, columns in squares) * -(-outs // _FUSED_CHANNELS)
    lanes = peak / (2 * device.multiprocessors * (device.clock_hertz or CLOCK_HERTZ))
    busiest = max(-(-blocks // device.multiprocessors), c["winograd_resident"] * lanes / _LANES)
    work = 2 * _FUSED_PRODUCTS * _FUSED_CHANNELS * 32 * (ins + c["winograd_prologue"]) * busiest
    arithmetic = work * device.multiprocessors / (peak * c["winograd_efficiency"])
    nbytes = shape.item_bytes * (sum(shape.sizes[:2]) + _FUSED_PRODUCTS * ins * outs)
    memory = nbytes / (device.memory_bandwidth * c["memory_efficiency"])
    return math.hypot(arithmetic, memory) + 2 * c["kernel_seconds"]


def nonfused_seconds(shape: ConvolutionShape, peak: float, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds of the four kernels that write the transforms of images, weights and products to memory."""
    assert device.memory_bandwidth is not None
    ins, outs = shape.in_channels, shape.out_channels
    squares = shape.batch * -(-shape.out_size[0] // _SQUARE) * -(-shape.out_size[1] // _SQUARE)
    rows, columns, depth = {"forward": (squares, outs, ins), "input": (squares, ins, outs),
                            "weight": (outs, ins, squares)}[shape.way]
    arithmetic = product_seconds(rows, columns, depth, _PRODUCTS, peak * c["cuda_core_efficiency"], c,
                                 "cuda_core", device, CUDA_CORE_TILES)
    transformed = SUM_BYTES * _PRODUCTS * (squares * (ins + outs) + ins * outs)
    memory = transformed / (device.memory_bandwidth * c["memory_efficiency"])
    transforms = (transformed + shape.item_bytes * sum(shape.sizes)) / (
        device.memory_bandwidth * c["transform_efficiency"])
    return math.hypot(arithmetic, memory) + transforms + 4 * c["kernel_seconds"]


_WARP = 32
_ISSUED = 128   # instructions of threads a clock: 4 schedulers of a multiprocessor issue one of a warp each
_DIVISIONS = 3  # of a result's number into image, channel, row and column


def depthwise_seconds(shape: ConvolutionShape, c: Mapping[str, float], device: DeviceSpec) -> tuple[float, float]:
    """Seconds by instructions and by memory of the kernel of one way. ``aten/src/ATen/native/cuda/DepthwiseConv2d.cu``:
    the thread of a result takes its number apart (``depthwise_index`` instructions), then multiplies an input and a
    weight for each tap (``depthwise_forward_tap``; the input gradient asks of each tap which result it belongs to:
    ``depthwise_input_tap``). The weight gradient has a block for each weight, whose warps go through all results: a
    division for each image, ``depthwise_weight_tap`` for each of its pixels.
    """
    images, results, _ = shape.sizes
    index = c["depthwise_index"]
    if shape.way == "weight":
        pixels = -(-shape.out_pixels // _WARP) * c["depthwise_weight_tap"]
        issued = results // shape.out_pixels * shape.taps * _WARP * (index / _DIVISIONS + pixels)
    else:
        issued = (images if shape.way == "input" else results) * (index + shape.taps * c[f"depthwise_{shape.way}_tap"])
    return _issue_seconds(issued, device), _move_seconds(shape, c["memory_efficiency"], device)


def is_last_depthwise(shape: ConvolutionShape) -> bool:
    """Whether cuDNN has kernels of its own for it where channels are last (``conv2d_c1_k1_nhwc``): images, and one
    channel for each.
    """
    return len(shape.kernel_size) == 2 and shape.groups == shape.in_channels == shape.out_channels


def last_depthwise_seconds(shape: ConvolutionShape, c: Mapping[str, float],
                           device: DeviceSpec) -> tuple[float, float]:
    """Seconds by instructions and by memory of cuDNN's kernels for channels last: for each tap of each result, and of
    the borders beside a row, so many instructions. The form is inferred from 7x7 kernels in bfloat16.
    """
    images, results, _ = shape.sizes
    elements, row = (images, shape.in_size[-1]) if shape.way == "input" else (results, shape.out_size[-1])
    walked = elements * (row + shape.kernel_size[-1] - 1) / row
    issued = walked * shape.taps * c[f"depthwise_last_{shape.way}_tap"]
    return _issue_seconds(issued, device), _move_seconds(shape, c["tensor_memory_efficiency"], device)


def _issue_seconds(instructions: float, device: DeviceSpec) -> float:
    assert device.multiprocessors is not None
    return instructions / (_ISSUED * device.multiprocessors * (device.clock_hertz or CLOCK_HERTZ))


def _move_seconds(shape: ConvolutionShape, efficiency: float, device: DeviceSpec) -> float:
    assert device.memory_bandwidth is not None
    return shape.item_bytes * sum(shape.sizes) / (device.memory_bandwidth * efficiency)


# How long convolutions and their gradients take on a device: the kernels of cuDNN, and PyTorch's depthwise ones, which
# run where channels are first (Convolution.cpp, use_cudnn_depthwise; in float16 cuDNN's may, which were not measured).
# On CUDA cores (float32 without TF32, and float64) cuDNN has implicit products and, for 3x3, Winograd's two algorithms;
# the fastest counts, as cuDNN's heuristics or its benchmark choose it. On tensor cores (16 bit, or float32 with TF32,
# PyTorch's default for convolutions) it has implicit products of channels-last tensors.

WAYS = ("forward", "input", "weight")
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def convolution_time(way: str, batch: int, in_channels: int, out_channels: int, in_size: tuple[int, ...],
                     out_size: tuple[int, ...], kernel_size: tuple[int, ...], groups: int, dtype: str,
                     device: DeviceSpec, *, stride: tuple[int, ...], dilation: tuple[int, ...], allow_tf32: bool,
                     channels_last: bool, transposed: bool = False) -> KernelTime | None:
    """Time of one way of a convolution: ``"forward"``, or the gradient of its ``"input"`` or ``"weight"``. Sizes are
    those of the images that go in and of the results that come out, without batch and channels; ``dtype`` is a name
    such as ``"float32"``. ``channels_last``: whether tensors lie so, as tensor cores want them. None where a figure of
    the device is unknown, or it is no CUDA device. Raises InputError for an unknown ``way``.
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
        if channels_last and is_last_depthwise(shape):
            kernels = 2 if way == "weight" else 1  # partial sums
            return _estimate(*last_depthwise_seconds(shape, c, device), kernels * c["kernel_seconds"], kernels,
                             c["depthwise_spread"])
        return _estimate(*depthwise_seconds(shape, c, device), c["kernel_seconds"], 1, c["depthwise_spread"])
    if tensor_peak <= peak or dtype == "float64":
        return _cuda_core_time(shape, peak, c, device)
    arithmetic, memory, fixed, kernels = tensor_seconds(shape, tensor_peak, c, device, channels_last)
    time = _estimate(arithmetic, memory, fixed, kernels, c["tensor_spread"])
    if dtype != "float32" or fixed < max(arithmetic, memory):
        return time
    # copies cost more than the product: a kernel without them may cost less
    return min(time, _cuda_core_time(shape, peak, c, device), key=lambda each: each.seconds)


def _cuda_core_time(shape: ConvolutionShape, peak: float, c: Mapping[str, float], device: DeviceSpec) -> KernelTime:
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
