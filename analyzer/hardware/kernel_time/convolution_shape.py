"""One convolution as its kernels see it: the sizes that every algorithm is a function of."""
from __future__ import annotations

import math
from typing import NamedTuple


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
