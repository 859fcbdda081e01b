"""The work of a convolution in tiles of tensor cores."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from analyzer.hardware.device_spec import DeviceSpec

from .pointwise import CLOCK_HERTZ


class ConvolutionShape(NamedTuple):
    """Sizes of a convolution of images of ``in_channels`` to results of ``out_channels``, and which part is computed.
    ``way``: ``"forward"``, ``"input"`` or ``"weight"`` (a gradient). ``steps``: product of the strides.
    """

    way: str
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    groups: int
    item_bytes: int
    steps: int
    is_dilated: bool
    in_pixels: int
    out_pixels: int
    taps: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of the images, of the results and of the weights."""
        return (self.batch * self.in_channels * self.in_pixels, self.batch * self.out_channels * self.out_pixels,
                self.in_channels * self.out_channels // self.groups * self.taps)

    @property
    def product(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the matrix product of one group, im2col's.

        >>> shape = make_shape("forward", 32, 64, 128, (56, 56), (28, 28), (3, 3), 1, 4, (2, 2), (1, 1))
        >>> shape.product
        (25088, 128, 576)
        >>> shape._replace(way="weight").product
        (128, 576, 25088)
        >>> shape._replace(way="input").product  # an input pixel takes part in 9/4 results, in the mean
        (100352, 64, 288)
        """
        ins, outs = self.in_channels // self.groups, self.out_channels // self.groups
        if self.way == "forward":
            return self.batch * self.out_pixels, outs, ins * self.taps
        if self.way == "input":
            return self.batch * self.in_pixels, ins, max(1, outs * self.taps * self.out_pixels // self.in_pixels)
        return outs, ins * self.taps, self.batch * self.out_pixels

    @property
    def is_plain_product(self) -> bool:
        """Whether images are multiplied by weights as they are: 1x1, of stride 1, in one group."""
        return self.taps == 1 and self.steps == 1 and self.groups == 1 and self.in_pixels == self.out_pixels


def make_shape(way: str, batch: int, in_channels: int, out_channels: int, in_size: tuple[int, ...],
               out_size: tuple[int, ...], kernel_size: tuple[int, ...], groups: int, item_bytes: int,
               stride: tuple[int, ...], dilation: tuple[int, ...]) -> ConvolutionShape:
    """The shape with what follows from its sizes."""
    return ConvolutionShape(way, batch, in_channels, out_channels, in_size, out_size, kernel_size, groups, item_bytes,
                            math.prod(stride), max(dilation, default=1) > 1, math.prod(in_size), math.prod(out_size),
                            math.prod(kernel_size))


# Rows and columns of output tiles, from the names of cuDNN's kernels (scudnn_128x64, sgemm_128x128, fprop_256x128).
CUDA_CORE_TILES = ((128, 128), (128, 64), (64, 64), (128, 32))
TENSOR_CORE_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64), (64, 32))
_LEAST_DEPTH = 256  # assumed: below it a share of a split product is not worth a block
SUM_BYTES = 4       # partial sums are float32


def product_seconds(rows: int, columns: int, depth: float, batch: int, rate: float, c: Mapping[str, float], pipe: str,
                    device: DeviceSpec, tiles: Sequence[tuple[int, int]]) -> float:
    """Seconds of arithmetic of ``batch`` products [rows, depth] by [depth, columns] by the best tile, largest first. A
    multiprocessor takes whole tiles, so the busiest one decides: ceil(tiles / multiprocessors) of them, each of
    ``depth`` steps and a ``prologue`` to fill its pipeline, at its share of ``rate`` (FLOP/s). Fewer than ``resident``
    blocks cannot hide their own latency, so they take no less than that many would. A smaller tile loads more for each
    product: the rate falls with 1/rows + 1/columns by ``tile_cost``, and is ``rate`` for the first tile.
    """
    assert device.multiprocessors is not None
    multiprocessors, resident = device.multiprocessors, c[f"{pipe}_resident"]
    tile_cost, steps = c[f"{pipe}_tile_cost"], depth + c[f"{pipe}_prologue"]
    best, unit = 0.0, 1 + tile_cost * (1 / tiles[0][0] + 1 / tiles[0][1])
    for tile_rows, tile_columns in tiles:
        blocks = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        busiest = max(-(-blocks // multiprocessors), resident)
        work = busiest * tile_rows * tile_columns * (1 + tile_cost * (1 / tile_rows + 1 / tile_columns))
        if not best or work < best:
            best = work
    return 2 * best * steps * multiprocessors / (rate * unit)


def split_product_seconds(rows: int, columns: int, depth: int, batch: int, rate: float, c: Mapping[str, float],
                          pipe: str, device: DeviceSpec, tiles: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Seconds of arithmetic, and bytes of partial sums, of products whose few tiles share their depth among blocks."""
    assert device.multiprocessors is not None
    tile_rows, tile_columns = tiles[0]
    blocks = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
    split = min(int(device.multiprocessors * max(1.0, c[f"{pipe}_resident"]) // blocks), depth // _LEAST_DEPTH)
    if split < 2:
        return product_seconds(rows, columns, depth, batch, rate, c, pipe, device, tiles), 0.0
    seconds = product_seconds(rows, columns, depth / split, batch * split, rate, c, pipe, device, tiles)
    return seconds, 2.0 * SUM_BYTES * split * batch * rows * columns


_SWEPT_ROWS = 128   # pixels of the tile that a multiprocessor works on: the middle of TENSOR_CORE_TILES
_NVJET = (9, 0)     # from Hopper on cuBLAS has nvjet kernels for 16 bit, whose tiles have any multiple of 8 rows,
_EIGHTH = 8         # as their names tell (nvjet_hsh_192x168)
_GATHERED_COLUMNS = 64
_VECTOR_BYTES = 16  # that a thread loads at once: rows of other lengths are not multiplied in place


def copy_seconds(elements: int, item_bytes: int, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds to write a tensor in the other order of channels (``nchwToNhwcKernel``): by the byte or the element."""
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    by_byte = 2 * elements * item_bytes / (device.memory_bandwidth * c["copy_efficiency"])
    clock = device.clock_hertz or CLOCK_HERTZ
    by_element = elements / (device.multiprocessors * clock * c["copy_elements"])
    return max(by_byte, by_element) + c["kernel_seconds"]


def is_multiplied_in_place(shape: ConvolutionShape) -> bool:
    """Whether a product takes its images channels first: a 1x1 whose rows of pixels are whole vectors."""
    return shape.is_plain_product and shape.in_pixels * shape.item_bytes % _VECTOR_BYTES == 0


def _padded(channels: int, shape: ConvolutionShape) -> int:
    vector = _VECTOR_BYTES // shape.item_bytes
    return -(-channels // vector) * vector


def is_gathered(shape: ConvolutionShape) -> bool:
    """Whether what a tap reads of a pixel is no more than a vector, as of a first layer's images."""
    channels = shape.out_channels if shape.way == "input" else shape.in_channels
    return shape.groups == 1 and shape.taps > 1 and channels * shape.item_bytes <= _VECTOR_BYTES


def gather_seconds(shape: ConvolutionShape, c: Mapping[str, float], device: DeviceSpec) -> float:
    """Seconds of the kernels whose loads, a vector for each tap of each pixel, outweigh what is multiplied. Each tile
    of 64 columns gathers again. Measured on an H200, it is the same for 16 and 32 bit, 7x7 and 16x16.
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
    """Seconds of arithmetic, of memory, of copies and launches; and how many kernels there are. In place, TF32 loses
    more than 16 bit: its tensor-core instructions take operands only along the depth (PTX ISA, ``wgmma``: transposed
    shared-memory operands for 16-bit types only).
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
    """Seconds of a product whose loads and arithmetic overlap, not wholly, and of what comes before and after."""
    return math.hypot(arithmetic, memory) + fixed
