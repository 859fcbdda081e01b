"""Fourier transforms: 5 n log₂ n real operations for n complex points, half of it between real and complex ones
(the count of the radix-2 algorithm, by which FFTW's benchFFT reports speed), rounded to an integer.
"""
from __future__ import annotations

from math import log2, prod
from typing import Any

from analyzer.meta.spec import TensorSpec

from .registration import register_each, register_flop_impl
from .size import components

Spec = TensorSpec


def transform_flops(shape: Spec, dims: list[int], per_point: float, scaled: bool) -> int:
    """``per_point`` n log₂ n for each of the batch's transforms over ``dims``, and a product for each scaled real
    number.

    >>> import torch
    >>> transform_flops(TensorSpec.of((3, 8), (8, 1), torch.complex64, "cpu"), [1], 5, False)  # 3 × 5 × 8 × 3
    360
    """
    points = prod(shape[d] for d in dims)
    return round(per_point * shape.numel * log2(points)) + (components(shape) if scaled else 0) if points else 0


def c2c_flops(x: Spec, dim: list[int], normalization: int, forward: bool = True, *, out: Any = None, **_: Any) -> int:
    """FLOPs of ``_fft_c2c``."""
    return transform_flops(x, dim, 5, normalization != 0)


def r2c_flops(x: Spec, dim: list[int], normalization: int, onesided: bool = True, *, out: Any = None, **_: Any) -> int:
    """FLOPs of ``_fft_r2c``."""
    return transform_flops(x, dim, 2.5, normalization != 0)


def c2r_flops(x: Spec, dim: list[int], normalization: int, last_dim_size: int, *, out: Spec, **_: Any) -> int:
    """FLOPs of ``_fft_c2r``."""
    return transform_flops(out, dim, 2.5, normalization != 0)


def prims_c2c_flops(x: Spec, *, dim: list[int], out: Any = None, **_: Any) -> int:
    """FLOPs of prims c2c."""
    return transform_flops(x, dim, 5, False)


def prims_r2c_flops(x: Spec, *, dim: list[int], out: Any = None, **_: Any) -> int:
    """FLOPs of prims r2c."""
    return transform_flops(x, dim, 2.5, False)


def prims_c2r_flops(x: Spec, *, dim: list[int], out: Spec, **_: Any) -> int:
    """FLOPs of prims c2r."""
    return transform_flops(out, dim, 2.5, False)


register_flop_impl("prims::fft_c2c", prims_c2c_flops)
register_flop_impl("prims::fft_r2c", prims_r2c_flops)
register_flop_impl("prims::fft_c2r", prims_c2r_flops)
register_each("_fft_c2c", c2c_flops)
register_each("_fft_r2c", r2c_flops)
register_each("_fft_c2r", c2r_flops)
