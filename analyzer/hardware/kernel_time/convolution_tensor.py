"""Convolutions on tensor cores, which take channels last: tensors that are not are copied before and after."""
from __future__ import annotations

import math
from collections.abc import Mapping

from analyzer.hardware.device_spec import DeviceSpec

from .convolution_shape import ConvolutionShape
from .convolution_tile import TENSOR_CORE_TILES, product_seconds, split_product_seconds

_VECTOR_BYTES = 16  # that a thread loads at once: rows of other lengths are not multiplied in place


def copy_seconds(elements: int, item_bytes: int, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds to write a tensor in the other order of channels: by the byte, or by the element where those are small.

    cuDNN's ``nchwToNhwcKernel`` and ``nhwcToNchwKernel`` move one element a thread and step.
    """
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    by_byte = 2 * elements * item_bytes / (device.memory_bandwidth * c["copy_efficiency"])
    clock = device.clock_hertz or 1.5e9
    by_element = elements / (device.multiprocessors * clock * c["copy_elements"])
    return max(by_byte, by_element) + c["kernel_seconds"]


def is_multiplied_in_place(shape: ConvolutionShape) -> bool:
    """Whether a product takes its images channels first: a 1x1 whose rows of pixels are whole vectors."""
    return shape.is_plain_product and shape.in_pixels * shape.item_bytes % _VECTOR_BYTES == 0


def tensor_seconds(shape: ConvolutionShape, peak: float, efficiency: float, c: Mapping[str, float],
                   device: DeviceSpec, channels_last: bool) -> tuple[float, float, float, int]:
    """Seconds of arithmetic, of memory, of copies and launches; and how many kernels there are."""
    assert device.memory_bandwidth is not None
    rows, columns, depth = shape.product
    vector = _VECTOR_BYTES // shape.item_bytes
    images, results, weights = shape.sizes
    bandwidth = device.memory_bandwidth * c["tensor_memory_efficiency"]
    memory = shape.item_bytes * (images + results + weights) / bandwidth
    fixed, kernels = c["kernel_seconds"], 1
    if shape.way == "weight":
        arithmetic, partial = split_product_seconds(rows, columns, depth, shape.groups, peak * efficiency, c, "tensor",
                                                    device, TENSOR_CORE_TILES)
        if partial:
            fixed, kernels = fixed + partial / bandwidth + c["kernel_seconds"], 2
    else:
        channels = depth // max(1, shape.taps)
        padded = depth * (-(-channels // vector) * vector) / channels if channels else depth
        arithmetic = product_seconds(rows, columns, padded, shape.groups, peak * efficiency, c, "tensor", device,
                                     TENSOR_CORE_TILES)
    if not channels_last and not is_multiplied_in_place(shape):
        for elements in (images, results, weights) if shape.taps > 1 else (images, results):
            fixed += copy_seconds(elements, shape.item_bytes, c, device)
            kernels += 1
    return arithmetic, memory, fixed, kernels


def sum_seconds(arithmetic: float, memory: float, fixed: float) -> float:
    """Seconds of a product whose loads and arithmetic overlap, not wholly, and of what comes before and after."""
    return math.hypot(arithmetic, memory) + fixed
