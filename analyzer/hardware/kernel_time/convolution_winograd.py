"""Winograd's algorithms for 3x3 convolutions (Lavin and Gray, CVPR 2016): transforms that save multiplications."""
from __future__ import annotations

import math
from collections.abc import Mapping

from analyzer.hardware.device_spec import DeviceSpec

from .convolution_shape import ConvolutionShape
from .convolution_tile import CUDA_CORE_TILES, SUM_BYTES, product_seconds
from .memory_bound import CLOCK_HERTZ

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
