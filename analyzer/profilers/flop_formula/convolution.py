"""FLOPs of convolutions, pooling, interpolation and operators of torchvision."""
from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import (
    FlopCount,
    Formula,
    first,
    multiply_adds,
    per_input,
    per_output,
    register_each,
    register_flop_impl,
    spread,
)

# Convolutions. Each output element (each input element, where transposed) meets one filter of `weight[1:]` elements,
# which already holds channels divided by groups. A bias adds nothing, as in torch.utils.flop_counter.

def convolution_macs(x: Spec, weight: Spec, out: Spec, transposed: bool) -> int:
    """Multiply-adds of x [n, c_in, ...], weight [c_out, c_in/groups, ...] (transposed: [c_in, c_out/groups, ...])."""
    return (x.numel if transposed else out.numel) * prod(weight[1:])


def forward_convolution_flops(x: Spec, weight: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """FLOPs of ``conv1d``, ``conv2d`` and their variants."""
    return multiply_adds(convolution_macs(x, weight, out, False), x)


def transposed_convolution_flops(x: Spec, weight: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """>>> import torch
    >>> spec = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> transposed_convolution_flops(spec(1, 8, 5, 5), spec(8, 1, 3, 3)).macs  # depthwise: 200 inputs, 9 taps each
    1800
    """
    return multiply_adds(convolution_macs(x, weight, x, True), x)


def backward(grad: Spec, x: Spec, weight: Spec, transposed: bool, output_mask: Sequence[bool]) -> FlopCount:
    """The gradients of input and of weight pair the same triples (input, tap, output) as the forward: its count."""
    wanted = bool(output_mask[0]) + bool(output_mask[1])
    return multiply_adds(wanted * convolution_macs(x, weight, grad, transposed), x)


def backward_of(transposed_at: int) -> Formula:
    """The formula of a backward kernel: ``transposed`` is argument ``transposed_at``, the output mask three later."""
    return lambda grad, x, weight, *rest, **__: backward(
        grad, x, weight, rest[transposed_at - 3], rest[transposed_at])


register_each("convolution _convolution convolution_overrideable",
    lambda x, weight, bias, stride, padding, dilation, transposed=False, *_, out, **__: (
        multiply_adds(convolution_macs(x, weight, out, transposed), x)))
register_each(
    "conv1d conv2d conv3d cudnn_convolution mkldnn_convolution miopen_convolution miopen_depthwise_convolution "
    "_mps_convolution _nnpack_spatial_convolution _slow_conv2d_forward slow_conv3d_forward slow_conv3d thnn_conv2d "
    "slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d conv_depthwise3d", forward_convolution_flops)
register_each(
    "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose "
    "_mps_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d", transposed_convolution_flops)
register_each("cudnn_convolution_relu miopen_convolution_relu",
    lambda x, weight, *_, out, **__: forward_convolution_flops(x, weight, out=out) + FlopCount(out.numel))
# relu(conv + alpha * z): the scale, the sum and the ReLU are 3 FLOPs an output element
register_each("cudnn_convolution_add_relu miopen_convolution_add_relu",
    lambda x, weight, *_, out, **__: forward_convolution_flops(x, weight, out=out) + FlopCount(3 * out.numel))
register_each("convolution_backward", backward_of(transposed_at=7))
register_each("convolution_backward_overrideable", backward_of(transposed_at=6))
register_each("mps_convolution_backward",
    lambda x, grad, weight, *rest, **__: backward(grad, x, weight, False, rest[-1]))
register_each("mps_convolution_transpose_backward",
    lambda x, grad, weight, *rest, **__: backward(grad, x, weight, True, rest[-1]))
# The .grad_input overload has no mask and fills all three
register_each("_slow_conv2d_backward",
    lambda grad, x, weight, kernel_size, stride, padding, output_mask=(True, True, True), *_, **__: (
        backward(grad, x, weight, False, output_mask)))
# x [time, n, c_in], weight [taps, c_in, c_out], out [time, n, c_out]
register_each("conv_tbc", lambda x, weight, *_, out, **__: multiply_adds(out.numel * weight[0] * weight[1], x))
register_each("conv_tbc_backward",
    lambda grad, x, weight, *_, **__: multiply_adds(2 * grad.numel * weight[0] * weight[1], x))


# Pooling. A window of k elements is k - 1 sums and a quotient, or k - 1 comparisons and a start: k FLOPs an output.

def pool(dims: int) -> Formula:
    """The formula of pooling in ``dims`` dimensions."""
    return lambda x, kernel_size, *_, out, **__: first(out).numel * prod(spread(kernel_size, dims))


def average_backward(dims: int) -> Formula:
    """Counts grad ÷ k once, and a sum into each of the window's k elements."""
    return lambda grad, x, kernel_size, *_, **__: grad.numel * (prod(spread(kernel_size, dims)) + 1)


def window_elements(sizes: Sequence[int], outputs: Sequence[int]) -> int:
    """Elements of all windows of an adaptive pooling: window i of n spans from ⌊i·size/n⌋ to ⌈(i+1)·size/n⌉.

    >>> window_elements([7], [3]), window_elements([4, 4], [2, 2])
    (9, 16)
    """
    return prod(sum(-(-(i + 1) * size // n) - i * size // n for i in range(n)) for size, n in zip(sizes, outputs))


def adaptive(dims: int) -> Formula:
    """The formula of adaptive pooling in ``dims`` dimensions."""
    return lambda x, *_, out, **__: prod(x[:-dims]) * window_elements(x[-dims:], first(out)[-dims:])


def adaptive_average_backward(dims: int) -> Formula:
    """The formula of its gradient."""
    return lambda grad, x, *_, **__: grad.numel + prod(x[:-dims]) * window_elements(x[-dims:], grad[-dims:])


register_each("avg_pool1d max_pool1d max_pool1d_with_indices quantized_max_pool1d", pool(1))
register_each(
    "avg_pool2d max_pool2d max_pool2d_with_indices fractional_max_pool2d mkldnn_max_pool2d quantized_max_pool2d",
    pool(2))
register_each(
    "avg_pool3d max_pool3d max_pool3d_with_indices fractional_max_pool3d mkldnn_max_pool3d quantized_max_pool3d",
    pool(3))
register_each("avg_pool2d_backward", average_backward(2))
register_each("avg_pool3d_backward", average_backward(3))
register_each("adaptive_avg_pool1d adaptive_max_pool1d", adaptive(1))
register_each("adaptive_avg_pool2d _adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d adaptive_max_pool2d", adaptive(2))
register_each("adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d", adaptive(3))
register_each("_adaptive_avg_pool2d_backward mkldnn_adaptive_avg_pool2d_backward", adaptive_average_backward(2))
register_each("_adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward", adaptive_average_backward(3))


# Interpolation and grid sampling, per output element and tap. Coordinates and weights are shared by batch and channels
# and left out, but those of a sampling grid, whose every point has its own.

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


# Operators of torchvision (registered by name: the library need not be there).

SAMPLE_FLOPS = 7  # a bilinear sample: four products, three sums
SAMPLE_BACKWARD_FLOPS = 2 * 4  # each tap: weight × grad, summed into place
OFFSET_BACKWARD_FLOPS = 2 * 3 * 4  # each coordinate and tap: value × grad × the other weight, summed

# Overlap of two boxes: corners (2 maxima, 2 minima), sides (2 differences, 2 maxima with 0), area, union (2), quotient.
OVERLAP_FLOPS = 12


def nms_flops(boxes: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """The overlap of each pair of boxes, once (the CUDA kernel skips none), and each area (3)."""
    n = boxes[0]
    return OVERLAP_FLOPS * (n * (n - 1) // 2) + 3 * n


def roi_align_flops(x: Spec, rois: Spec, scale: float, height: int, width: int, sampling_ratio: int, *_: Any, out: Any,
                    **__: Any) -> int | None:
    """sampling_ratio² samples an output element, sum, ÷ number; a ratio ≤ 0 takes it from each box: unknown."""
    if sampling_ratio <= 0:
        return None
    samples = sampling_ratio ** 2
    return rois[0] * x[1] * height * width * samples * (SAMPLE_FLOPS + 1)


def ps_roi_align_flops(x: Spec, rois: Spec, scale: float, height: int, width: int, sampling_ratio: int, *_: Any,
                       out: Any, **__: Any) -> int | None:
    """Position-sensitive: each bin has channels of its own."""
    channels = Spec.of((x[0], x[1] // (height * width), *x[2:]), x.stride, x.dtype, x.device)
    return roi_align_flops(channels, rois, scale, height, width, sampling_ratio, out=out)


def sampled_columns(x: Spec, weight: Spec, positions: int) -> int:
    """Samples that a deformable convolution takes: one for each input channel, tap and output position."""
    return x[0] * x[1] * prod(weight[2:]) * positions


def deform_conv2d_flops(x: Spec, weight: Spec, offset: Spec, mask: Spec, bias: Spec, *rest: Any, out: Spec,
                        **_: Any) -> FlopCount:
    """Bilinear samples, × the mask where used, and the convolution of them."""
    columns = sampled_columns(x, weight, out[2] * out[3])
    return multiply_adds(out.numel * prod(weight[1:]), x) + FlopCount(columns * (SAMPLE_FLOPS + bool(rest[-1])))


def deform_conv2d_backward_flops(grad: Spec, x: Spec, weight: Spec, *rest: Any, out: Any = None, **_: Any) -> FlopCount:
    """Both products, the samples again for the weight's, and gradients of input, offset and mask (2) from columns'."""
    columns = sampled_columns(x, weight, grad[2] * grad[3])
    masked = 3 * bool(rest[-1])
    return multiply_adds(2 * grad.numel * prod(weight[1:]), x) + FlopCount(
        columns * (SAMPLE_FLOPS + SAMPLE_BACKWARD_FLOPS + OFFSET_BACKWARD_FLOPS + masked))


register_flop_impl("torchvision::nms", nms_flops)
for _name in ("roi_align", "_roi_align_forward"):  # the second is a dry run's own, below its casts
    register_flop_impl(f"torchvision::{_name}", roi_align_flops)
# The last arguments are sampling_ratio and aligned
register_flop_impl("torchvision::_roi_align_backward", lambda grad, *rest, **_: (
    None if rest[-2] <= 0 else grad.numel * rest[-2] ** 2 * (SAMPLE_BACKWARD_FLOPS + 1)))
register_flop_impl("torchvision::ps_roi_align", ps_roi_align_flops)
register_flop_impl("torchvision::deform_conv2d", deform_conv2d_flops)
register_flop_impl("torchvision::_deform_conv2d_backward", deform_conv2d_backward_flops)
