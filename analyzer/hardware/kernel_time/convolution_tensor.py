"""Convolutions on tensor cores, which take channels last: tensors that are not are copied before and after."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from analyzer.hardware.device_spec import DeviceSpec

from .convolution_shape import ConvolutionShape
from .convolution_tile import TENSOR_CORE_TILES, product_seconds, split_product_seconds
from .memory_bound import CLOCK_HERTZ

_SWEPT_ROWS = 128   # pixels of the tile that a multiprocessor works on: the middle of TENSOR_CORE_TILES
_NVJET = (9, 0)     # from Hopper on cuBLAS has nvjet kernels for 16 bit, whose tiles have any multiple of 8 rows,
_EIGHTH = 8         # as their names tell (nvjet_hsh_192x168)
_GATHERED_COLUMNS = 64
_VECTOR_BYTES = 16  # that a thread loads at once: rows of other lengths are not multiplied in place


def copy_seconds(elements: int, item_bytes: int, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds to write a tensor in the other order of channels: by the byte, or by the element where those are small.

    cuDNN's ``nchwToNhwcKernel`` and ``nhwcToNchwKernel`` move one element a thread and step.
    """
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    by_byte = 2 * elements * item_bytes / (device.memory_bandwidth * c["copy_efficiency"])
    clock = device.clock_hertz or CLOCK_HERTZ
    by_element = elements / (device.multiprocessors * clock * c["copy_elements"])
    return max(by_byte, by_element) + c["kernel_seconds"]


def is_multiplied_in_place(shape: ConvolutionShape) -> bool:
    """Whether a product takes its images channels first: a 1x1 whose rows of pixels are whole vectors."""
    return shape.is_plain_product and shape.in_pixels * shape.item_bytes % _VECTOR_BYTES == 0


def _padded(channels: int, shape: ConvolutionShape) -> int:
    """Channels that a kernel computes: whole vectors."""
    vector = _VECTOR_BYTES // shape.item_bytes
    return -(-channels // vector) * vector


def is_gathered(shape: ConvolutionShape) -> bool:
    """Whether what a tap reads of a pixel is no more than a vector, as of a first layer's images."""
    channels = shape.out_channels if shape.way == "input" else shape.in_channels
    return shape.groups == 1 and shape.taps > 1 and channels * shape.item_bytes <= _VECTOR_BYTES


def gather_seconds(shape: ConvolutionShape, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds of the kernels whose loads, a vector for each tap of each pixel, outweigh what is multiplied.

    Each tile of 64 columns gathers again. Measured on an H200, it is the same for 16 and 32 bit, 7x7 and 16x16.

    >>> from analyzer.hardware import find_device
    >>> from .convolution_shape import make_shape
    >>> shape = make_shape("forward", 1, 3, 128, (64, 64), (64, 64), (3, 3), 1, 4, (1, 1), (1, 1))
    >>> clocks = 2 * 64 * 64 * 9 / 0.25 / 132  # vectors of a multiprocessor
    >>> round(gather_seconds(shape, {"gathered_vectors": 0.25}, find_device("h200")) / (clocks / 1.98e9), 6)
    1.0
    """
    assert device.multiprocessors is not None
    rows, columns, depth = shape.product
    if shape.way == "weight":
        vectors = depth * shape.taps * -(-rows // _GATHERED_COLUMNS)
    else:
        channels = shape.in_channels if shape.way == "forward" else shape.out_channels
        vectors = rows * depth // channels * -(-columns // _GATHERED_COLUMNS)
    return vectors / (device.multiprocessors * (device.clock_hertz or CLOCK_HERTZ) * c["gathered_vectors"])


def tensor_seconds(shape: ConvolutionShape, peak: float, c: Mapping[str, float], device: DeviceSpec,
                   channels_last: bool) -> tuple[float, float, float, int]:
    """Seconds of arithmetic, of memory, of copies and launches; and how many kernels there are.

    In place, TF32 loses more than 16 bit: its tensor-core instructions take operands only along the depth
    (PTX ISA, ``wgmma``: transposed shared-memory operands for 16-bit types only).
    """
    name = "tf32" if shape.item_bytes == 4 else "half"
    copied = _product(shape, peak * c[f"{name}_efficiency"], c, device, 1)
    if channels_last or shape.in_pixels == shape.out_pixels == 1:
        return copied
    images, results, weights = shape.sizes
    images = images // shape.in_channels * _padded(shape.in_channels, shape)
    fixed, kernels = copied[2], copied[3]
    for elements in (images, results, weights) if shape.taps > 1 else (images, results):
        fixed += copy_seconds(elements, shape.item_bytes, c, device)
        kernels += 1
    copied = (*copied[:2], fixed, kernels)
    if is_multiplied_in_place(shape):
        in_place = _product(shape, peak * c[f"{name}_in_place_efficiency"], c, device, shape.batch)
        if sum_seconds(*in_place[:3]) < sum_seconds(*copied[:3]):
            return in_place
    return copied


def _product(shape: ConvolutionShape, rate: float, c: Mapping[str, float], device: DeviceSpec,
             parts: int) -> tuple[float, float, float, int]:
    """One kernel, two where its sums are split; an image each where its rows are cut into ``parts``."""
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    rows, columns, depth = shape.product
    bandwidth = device.memory_bandwidth * c["tensor_memory_efficiency"]
    images, results, weights = shape.sizes
    if shape.way == "forward" and shape.taps > 1 and device.l2_bytes:  # a sweep over the channels for each tap
        swept = _SWEPT_ROWS * device.multiprocessors * shape.in_channels // shape.groups * shape.item_bytes
        missed = 1 - min(1.0, device.l2_bytes / 2 / min(swept, images * shape.item_bytes))
        images += int(images * (shape.taps - 1) * missed)
    memory = shape.item_bytes * (images + results + weights) / bandwidth
    if is_gathered(shape):
        return gather_seconds(shape, c, device), memory, c["kernel_seconds"], 1
    if shape.way == "weight":
        arithmetic, partial = split_product_seconds(rows, columns, depth, shape.groups, rate * c["weight_efficiency"],
                                                    c, "tensor", device, TENSOR_CORE_TILES)
    else:
        channels = (shape.in_channels if shape.way == "forward" else shape.out_channels) // shape.groups
        padded = depth * _padded(channels, shape) // channels
        if shape.is_plain_product:
            rows //= parts
            tiles: Sequence[tuple[int, int]] = TENSOR_CORE_TILES
            if shape.item_bytes == 2 and (device.compute_capability or (0, 0)) >= _NVJET:
                even = -(-rows // -(-rows // tiles[0][0]) // _EIGHTH) * _EIGHTH
                tiles = (*tiles, (even, tiles[0][1]))
            arithmetic, partial = split_product_seconds(rows, columns, padded, parts, rate, c, "tensor", device, tiles)
        else:
            arithmetic, partial = product_seconds(rows, columns, padded, shape.groups, rate, c, "tensor", device,
                                                  TENSOR_CORE_TILES), 0.0
    if partial:
        return arithmetic, memory, partial / bandwidth + 2 * c["kernel_seconds"], 2
    return arithmetic, memory, c["kernel_seconds"], 1


def sum_seconds(arithmetic: float, memory: float, fixed: float) -> float:
    """Seconds of a product whose loads and arithmetic overlap, not wholly, and of what comes before and after.

    >>> sum_seconds(3.0, 4.0, 1.0)
    6.0
    """
    return math.hypot(arithmetic, memory) + fixed
