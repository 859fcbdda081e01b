"""Interpolation and grid sampling, per output element and tap. Coordinates and weights are shared by batch and channels
and left out, but those of a sampling grid, whose every point has its own.
"""
from __future__ import annotations

from math import ceil, prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import Formula, register_each
from .size import multiply_adds, per_input, per_output

LERP_FLOPS = 3  # w₀ a + w₁ b
CUBIC_FLOPS = 7  # four products, three sums

# A d-linear value is 2ᵈ - 1 such pairs; a bicubic one is a cubic of each of four rows and one of those.
UPSAMPLE_FLOPS = {"linear1d": LERP_FLOPS, "bilinear2d": 3 * LERP_FLOPS, "trilinear3d": 7 * LERP_FLOPS,
                  "bicubic2d": 5 * CUBIC_FLOPS}

# Each tap of the gradient: the product of its weights (dims factors), × grad, and the sum into place.
UPSAMPLE_BACKWARD_FLOPS = {"linear1d": 2 * 2, "bilinear2d": 4 * 3, "trilinear3d": 8 * 4, "bicubic2d": 16 * 3}

# Half the support of the antialiasing filters (Pillow's Resample.c, which ATen's UpSampleKernel follows).
SUPPORT = {"bilinear2d": 1, "bicubic2d": 2, "lanczos2d": 3}


def filtered_flops(before: Spec, after: Spec, support: int) -> int:
    """Separable filtering of images from one size to another: rows, then columns, 2 FLOPs a tap."""
    (h_in, w_in), (h_out, w_out) = before[-2:], after[-2:]

    def taps(size_in: int, size_out: int) -> int:
        return ceil(support * max(1.0, size_in / size_out)) * 2 + 1

    return 2 * prod(before[:-2]) * (h_in * w_out * taps(w_in, w_out) + h_out * w_out * taps(h_in, h_out))


def antialiased(support: int) -> Formula:
    """The formula of a filter that spans ``support`` input elements at scale 1."""
    return lambda x, *_, out, **__: filtered_flops(x, out, support)


def antialiased_backward(support: int) -> Formula:
    """The transposed filter meets the same taps."""
    return lambda grad, *_, out, **__: filtered_flops(out, grad, support)


def grid_point_flops(dims: int) -> int:
    """Each coordinate scaled to pixels (3), its two weights (2), and the 2ᵈ products of weights (d - 1 each)."""
    return int(5 * dims + 2 ** dims * (dims - 1))


def grid_sampler(dims: int) -> Formula:
    """Modes: 0 d-linear (2ᵈ products, 2ᵈ - 1 sums), 1 nearest (no arithmetic but the coordinates), 2 bicubic."""
    def grid_sampler_flops(x: Spec, grid: Spec, interpolation_mode: int = 0, *_: Any, out: Spec, **__: Any) -> int:
        points: int = prod(grid[:-1])
        if interpolation_mode == 1:
            return 4 * dims * points  # scaled (3) and rounded
        if interpolation_mode == 2:
            # and four cubic weights of 4 FLOPs for each coordinate
            return 5 * CUBIC_FLOPS * out.numel + 19 * dims * points
        return int(out.numel * (2 * 2 ** dims - 1) + points * grid_point_flops(dims))

    return grid_sampler_flops


def grid_sampler_backward(dims: int) -> Formula:
    """Each tap: weight × grad summed into x's gradient (2), and for each coordinate of the grid's, the tap's value ×
    grad × the other weights, summed (dims + 1).
    """
    def grid_sampler_backward_flops(grad: Spec, x: Spec, grid: Spec, interpolation_mode: int = 0, padding_mode: int = 0,
                                    align_corners: bool = False, output_mask: Any = (True, True), *_: Any,
                                    out: Any = None, **__: Any) -> int:
        nearest = interpolation_mode == 1
        taps = int({0: 2 ** dims, 1: 1, 2: 16}[interpolation_mode])
        of_input = 2 * taps if output_mask[0] else 0
        of_grid = dims * (dims + 1) * taps if output_mask[1] and not nearest else 0
        of_point = 4 * dims if nearest else grid_point_flops(dims)
        return grad.numel * (of_input + of_grid) + prod(grid[:-1]) * of_point

    return grid_sampler_backward_flops


for _name, _flops in UPSAMPLE_FLOPS.items():
    register_each(f"upsample_{_name}", per_output(_flops))
for _name, _flops in UPSAMPLE_BACKWARD_FLOPS.items():
    register_each(f"upsample_{_name}_backward", per_input(_flops))
for _name, _support in SUPPORT.items():
    register_each(f"_upsample_{_name}_aa", antialiased(_support))
    register_each(f"_upsample_{_name}_aa_backward", antialiased_backward(_support))
del _name, _flops, _support
for _dims in (2, 3):
    register_each(f"grid_sampler_{_dims}d", grid_sampler(_dims))
    register_each(f"grid_sampler_{_dims}d_backward", grid_sampler_backward(_dims))
del _dims
register_each("cudnn_grid_sampler _grid_sampler_2d_cpu_fallback", grid_sampler(2))
register_each("cudnn_grid_sampler_backward",
    lambda x, grid, grad, *_, **__: grid_sampler_backward(2)(grad, x, grid))
register_each("_grid_sampler_2d_cpu_fallback_backward", grid_sampler_backward(2))  # which is given no output mask
# Each point's homogeneous coordinates by theta [n, d, d + 1]
register_each("affine_grid_generator cudnn_affine_grid_generator",
    lambda theta, *_, out, **__: multiply_adds(out.numel * theta[-1]))
register_each("affine_grid_generator_backward cudnn_affine_grid_generator_backward",
    lambda grad, *_, **__: multiply_adds(grad.numel * (grad[-1] + 1)))
