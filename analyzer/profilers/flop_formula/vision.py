"""Operators of torchvision (registered by name: the library need not be there)."""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, register_flop_impl
from .size import multiply_adds

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
