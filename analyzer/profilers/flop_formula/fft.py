"""Fourier transforms: 5 n log₂ n real operations for n complex points, half of it between real and complex ones
(the count of the radix-2 algorithm, by which FFTW's benchFFT reports speed), rounded to an integer.
"""
from __future__ import annotations

from math import log2, prod

from analyzer.meta.spec import TensorSpec as Spec

from .registration import register_each, register_flop_impl
from .size import components


def transform_flops(shape: Spec, dims: list[int], per_point: float, scaled: bool) -> int:
    """``per_point`` n log₂ n for each of the batch's transforms over ``dims``, a product for each scaled real number.

    >>> import torch
    >>> transform_flops(Spec.of((3, 8), (8, 1), torch.complex64, "cpu"), [1], 5, False)  # 3 × 5 × 8 × 3
    360
    """
    points = prod(shape[d] for d in dims)
    return round(per_point * shape.numel * log2(points)) + (components(shape) if scaled else 0) if points else 0


register_flop_impl("prims::fft_c2c", lambda x, *_, dim, **__: transform_flops(x, dim, 5, False))
register_flop_impl("prims::fft_r2c", lambda x, *_, dim, **__: transform_flops(x, dim, 2.5, False))
register_flop_impl("prims::fft_c2r", lambda *_, dim, out, **__: transform_flops(out, dim, 2.5, False))
register_each("_fft_c2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 5, normalization != 0))
register_each("_fft_r2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 2.5, normalization != 0))
register_each("_fft_c2r",
    lambda x, dim, normalization, *_, out, **__: transform_flops(out, dim, 2.5, normalization != 0))
