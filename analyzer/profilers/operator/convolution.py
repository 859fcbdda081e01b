"""Convolutions, pooling, interpolation and operators of torchvision: FLOPs, and the time of their kernels."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.pointwise import atomic_time, plane_time, pointwise_time, stream_time, window_time
from analyzer.hardware.kernel_time.reduction import reduction_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .pointwise import moved_bytes, unmeasured, with_copies
from .registration import (
    FlopCount,
    OfSignature,
    first,
    multiply_adds,
    per_input,
    per_output,
    register_each,
    register_flop_impl,
    register_times,
    spread,
    uses_tf32,
)

# FLOPs of convolutions. Each output element (each input element, where transposed) meets one filter of `weight[1:]`
# elements, which already holds channels divided by groups. A bias adds nothing, as in torch.utils.flop_counter.

def forward_flops(x: Spec, weight: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """FLOPs of ``conv1d``, ``conv2d`` and their variants: x [n, c_in, ...], weight [c_out, c_in/groups, ...]."""
    return multiply_adds(out.numel * prod(weight[1:]), x)


def transposed_flops(x: Spec, weight: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """The same transposed: weight [c_in, c_out/groups, ...]."""
    return multiply_adds(x.numel * prod(weight[1:]), x)


def convolution_backward_flops(signature: Signature) -> FlopCount:
    """The gradients of input and of weight pair the same triples (input, tap, output) as the forward: its count. Where
    there is no mask (``_slow_conv2d_backward.grad_input``) all are filled.
    """
    named = signature.named_arguments()
    x, weight, grad = images(named), named["weight"], named["grad_output"]
    transposed = named.get("transposed", "transpose" in signature.op._schema.name)
    wanted = sum(map(bool, named.get("output_mask", (True, True))[:2]))
    return multiply_adds(wanted * (x if transposed else grad).numel * prod(weight[1:]), x)


def images(arguments: Mapping[str, Any]) -> Spec:
    spec: Spec = arguments["input"] if "input" in arguments else arguments["self"]
    return spec


register_each("convolution _convolution convolution_overrideable",
    lambda x, weight, bias, stride, padding, dilation, transposed=False, *_, out, **__: (
        (transposed_flops if transposed else forward_flops)(x, weight, out=out)))
register_each(
    "conv1d conv2d conv3d cudnn_convolution mkldnn_convolution miopen_convolution miopen_depthwise_convolution "
    "_mps_convolution _nnpack_spatial_convolution _slow_conv2d_forward slow_conv3d_forward slow_conv3d thnn_conv2d "
    "slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d conv_depthwise3d", forward_flops)
register_each(
    "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose "
    "_mps_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d", transposed_flops)
register_each("cudnn_convolution_relu miopen_convolution_relu",
    lambda x, weight, *_, out, **__: forward_flops(x, weight, out=out) + FlopCount(out.numel))
# relu(conv + alpha * z): the scale, the sum and the ReLU are 3 FLOPs an output element
register_each("cudnn_convolution_add_relu miopen_convolution_add_relu",
    lambda x, weight, *_, out, **__: forward_flops(x, weight, out=out) + FlopCount(3 * out.numel))
register_each("convolution_backward convolution_backward_overrideable mps_convolution_backward "
              "mps_convolution_transpose_backward _slow_conv2d_backward", OfSignature(convolution_backward_flops))
# x [time, n, c_in], weight [taps, c_in, c_out], out [time, n, c_out]
register_each("conv_tbc", lambda x, weight, *_, out, **__: multiply_adds(out.numel * weight[0] * weight[1], x))
register_each("conv_tbc_backward",
    lambda grad, x, weight, *_, **__: multiply_adds(2 * grad.numel * weight[0] * weight[1], x))


# FLOPs of pooling. A window of k elements is k - 1 sums and a quotient, or k - 1 comparisons and a start: k an output.

def window_elements(sizes: Sequence[int], outputs: Sequence[int]) -> int:
    """Elements of all windows of an adaptive pooling: window i of n spans from ⌊i·size/n⌋ to ⌈(i+1)·size/n⌉.

    >>> window_elements([7], [3]), window_elements([4, 4], [2, 2])
    (9, 16)
    """
    return prod(sum(-(-(i + 1) * size // n) - i * size // n for i in range(n)) for size, n in zip(sizes, outputs))


def adaptive_elements(x: Spec, pooled: Spec, dims: int) -> int:
    return prod(x[:-dims]) * window_elements(x[-dims:], pooled[-dims:])


for _dims, _names in {1: "avg_pool1d max_pool1d max_pool1d_with_indices quantized_max_pool1d",
                      2: "avg_pool2d max_pool2d max_pool2d_with_indices fractional_max_pool2d mkldnn_max_pool2d "
                         "quantized_max_pool2d",
                      3: "avg_pool3d max_pool3d max_pool3d_with_indices fractional_max_pool3d mkldnn_max_pool3d "
                         "quantized_max_pool3d"}.items():
    register_each(_names, lambda x, kernel_size, *_, out, dims=_dims, **__: (
        first(out).numel * prod(spread(kernel_size, dims))))
    register_each(f"adaptive_avg_pool{_dims}d _adaptive_avg_pool{_dims}d mkldnn_adaptive_avg_pool{_dims}d "
                  f"adaptive_max_pool{_dims}d",
                  lambda x, *_, out, dims=_dims, **__: adaptive_elements(x, first(out), dims))
    # grad ÷ k once, and a sum into each of the window's k elements
    register_each(f"avg_pool{_dims}d_backward", lambda grad, x, kernel_size, *_, dims=_dims, **__: (
        grad.numel * (prod(spread(kernel_size, dims)) + 1)))
    register_each(f"_adaptive_avg_pool{_dims}d_backward mkldnn_adaptive_avg_pool{_dims}d_backward "
                  f"adaptive_avg_pool{_dims}d_backward",
                  lambda grad, x, *_, dims=_dims, **__: grad.numel + adaptive_elements(x, grad, dims))
# TorchInductor's, of as many dimensions as the window is given
register_flop_impl.add("prims::_low_memory_max_pool_with_offsets", lambda x, kernel_size, *_, out, **__: (
    first(out).numel * prod(kernel_size)))


# FLOPs of interpolation and grid sampling, per output element and tap. Coordinates and weights are shared by batch and
# channels and left out, but those of a sampling grid, whose every point has its own.

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


def grid_point_flops(dims: int) -> int:
    """Each coordinate scaled to pixels (3), its two weights (2), and the 2ᵈ products of weights (d - 1 each)."""
    return int(5 * dims + 2 ** dims * (dims - 1))


def grid_sampler_flops(x: Spec, grid: Spec, interpolation_mode: int = 0, *_: Any, out: Spec, **__: Any) -> int:
    """Modes: 0 d-linear (2ᵈ products, 2ᵈ - 1 sums), 1 nearest (no arithmetic but the coordinates), 2 bicubic."""
    dims, points = len(x) - 2, prod(grid[:-1])
    if interpolation_mode == 1:
        return 4 * dims * points  # scaled (3) and rounded
    if interpolation_mode == 2:
        return 5 * CUBIC_FLOPS * out.numel + 19 * dims * points  # and four cubic weights of 4 FLOPs for each coordinate
    return int(out.numel * (2 * 2 ** dims - 1) + points * grid_point_flops(dims))


def grid_sampler_backward_flops(grad: Spec, x: Spec, grid: Spec, interpolation_mode: int = 0, padding_mode: int = 0,
                                align_corners: bool = False, output_mask: Any = (True, True), *_: Any,
                                out: Any = None, **__: Any) -> int:
    """Each tap: weight × grad summed into x's gradient (2), and for each coordinate of the grid's, the tap's value ×
    grad × the other weights, summed (dims + 1).
    """
    dims, nearest = len(x) - 2, interpolation_mode == 1
    taps = int({0: 2 ** dims, 1: 1, 2: 16}[interpolation_mode])
    of_input = 2 * taps if output_mask[0] else 0
    of_grid = dims * (dims + 1) * taps if output_mask[1] and not nearest else 0
    return grad.numel * (of_input + of_grid) + prod(grid[:-1]) * (4 * dims if nearest else grid_point_flops(dims))


for _name, _flops in UPSAMPLE_FLOPS.items():
    register_each(f"upsample_{_name}", per_output(_flops))
for _name, _flops in UPSAMPLE_BACKWARD_FLOPS.items():
    register_each(f"upsample_{_name}_backward", per_input(_flops))
for _name, _support in SUPPORT.items():
    register_each(f"_upsample_{_name}_aa", lambda x, *_, out, support=_support, **__: filtered_flops(x, out, support))
    register_each(f"_upsample_{_name}_aa_backward",  # the transposed filter meets the same taps
                  lambda grad, *_, out, support=_support, **__: filtered_flops(out, grad, support))
register_each("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler _grid_sampler_2d_cpu_fallback", grid_sampler_flops)
register_each("cudnn_grid_sampler_backward", lambda x, grid, grad, *_, **__: grid_sampler_backward_flops(grad, x, grid))
# the fallback's is given no output mask
register_each("grid_sampler_2d_backward grid_sampler_3d_backward _grid_sampler_2d_cpu_fallback_backward",
              grid_sampler_backward_flops)
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


def roi_align_flops(x: Spec, rois: Spec, scale: float, height: int, width: int, sampling_ratio: int, *_: Any,
                    out: Any = None, **__: Any) -> int | None:
    """sampling_ratio² samples an output element, sum, ÷ number; a ratio ≤ 0 takes it from each box: unknown."""
    if sampling_ratio <= 0:
        return None
    return rois[0] * x[1] * height * width * sampling_ratio ** 2 * (SAMPLE_FLOPS + 1)


def deformed_flops(x: Spec, weight: Spec, out: Spec, products: int, each: int) -> FlopCount:
    """So many products of a deformable convolution, and ``each`` for a sample of an input channel, tap and position."""
    samples = x[0] * x[1] * prod(weight[2:]) * out[2] * out[3]
    return multiply_adds(products * out.numel * prod(weight[1:]), x) + FlopCount(samples * each)


# The overlap of each pair of boxes, once (the CUDA kernel skips none), and each area (3)
register_flop_impl.add("torchvision::nms", lambda boxes, *_, **__: (
    OVERLAP_FLOPS * (boxes[0] * (boxes[0] - 1) // 2) + 3 * boxes[0]))
for _name in ("roi_align", "_roi_align_forward"):  # the second is a dry run's own, below its casts
    register_flop_impl.add(f"torchvision::{_name}", roi_align_flops)
# The last arguments are sampling_ratio and aligned
register_flop_impl.add("torchvision::_roi_align_backward", lambda grad, *rest, **_: (
    None if rest[-2] <= 0 else grad.numel * rest[-2] ** 2 * (SAMPLE_BACKWARD_FLOPS + 1)))
# Position-sensitive: each bin has channels of its own
register_flop_impl.add("torchvision::ps_roi_align", lambda x, rois, scale, height, width, *rest, **_: roi_align_flops(
    Spec.of((x[0], x[1] // (height * width), *x[2:]), x.stride, x.dtype, x.device), rois, scale, height, width, *rest))
# Bilinear samples, × the mask where used, and the convolution of them
register_flop_impl.add("torchvision::deform_conv2d", lambda x, weight, *rest, out, **_: (
    deformed_flops(x, weight, out, 1, SAMPLE_FLOPS + bool(rest[-1]))))
# Both products, the samples again for the weight's, and gradients of input, offset and mask (2) from columns'
register_flop_impl.add("torchvision::_deform_conv2d_backward", lambda grad, x, weight, *rest, **_: deformed_flops(
    x, weight, grad, 2, SAMPLE_FLOPS + SAMPLE_BACKWARD_FLOPS + OFFSET_BACKWARD_FLOPS + 3 * bool(rest[-1])))


# The time of convolutions: which ways they compute, and what runs beside cuDNN's kernels; of pooling and resampling.

FORWARD = ("convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose "
           "cudnn_convolution_relu cudnn_convolution_add_relu _conv_depthwise2d conv_depthwise3d ")
COLUMNS = ("_slow_conv2d_forward thnn_conv2d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d "
           "slow_conv_transpose3d")


def _is_channels_last(spec: Spec) -> bool:
    """Whether the channels of an image or a volume lie beside each other, as ``suggest_memory_format`` tells it."""
    return len(spec) in (4, 5) and spec.stride[1] == 1 and spec.stride[-1] >= spec[1] and prod(spec[1:]) > 1


def _runs_channels_last(x: Spec, w: Spec) -> bool:
    """Whether cuDNN runs it in this order; PyTorch's own kernels take channels first (``Convolution.cpp``,
    ``determine_backend_memory_format``).
    """
    return (torch.backends.cudnn.enabled and x.dtype != torch.float64
            and (_is_channels_last(x) or _is_channels_last(w)))


def _convolve(way: str, x: Spec, y: Spec, w: Spec, arguments: Mapping[str, Any], transposed: bool,
              device: DeviceSpec) -> KernelTime | None:
    """One way of a convolution of ``x`` to ``y``, and the copies that PyTorch makes of tensors in another order."""
    dims = len(x) - 2
    channels_last = _runs_channels_last(x, w)
    allow_tf32 = arguments.get("allow_tf32")
    time = convolution_time(
        way, x[0], x[1], y[1], x[2:], y[2:], w[2:], arguments.get("groups", x[1] if w[1] == 1 else 1),
        str(x.dtype).removeprefix("torch."), device, stride=spread(arguments.get("stride"), dims),
        dilation=spread(arguments.get("dilation"), dims),
        allow_tf32=uses_tf32("conv") if allow_tf32 is None else allow_tf32,
        channels_last=channels_last, transposed=transposed)
    read = {"forward": (x, w), "input": (y, w), "weight": (x, y)}[way]
    copied = [spec for spec in read if len(spec) in (4, 5) and channels_last != _is_channels_last(spec)
              and prod(spec[2:]) > 1 and spec[1] > 1]
    return join_known(time, *(stream_time(2 * spec.nbytes, device) for spec in copied))


def time_forward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A convolution; a bias is added by a kernel of its own, except by PyTorch's depthwise kernels and fused ones."""
    name = signature.op._schema.name
    arguments = signature.named_arguments()
    x, w, y = images(arguments), arguments["weight"], signature.outputs[0]
    transposed = bool(arguments.get("transposed", "transpose" in name))
    time = _convolve("forward", x, y, w, arguments, transposed, device)
    adds_bias = "depthwise" in name or "relu" in name or (
        1 < arguments.get("groups", 1) == x[1] and not transposed and not _runs_channels_last(x, w))
    if arguments.get("bias") is not None and not adds_bias:
        bias = pointwise_time(y.numel, 2 * y.nbytes, device, dimensions=3, operands=3)  # a value a channel
        time = join_known(time, bias)
    if name.removeprefix("aten::") in COLUMNS.split():  # im2col before the product, or col2im after it
        columns = (x if transposed else y).numel // (x if transposed else y)[1] * w.numel // w[0]
        time = join_known(time, stream_time(2 * columns * x.dtype.itemsize, device))
    return time


def time_backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The gradients that are asked for: each is a convolution, that of the bias a sum."""
    arguments = signature.named_arguments()
    x, w, y = images(arguments), arguments["weight"], arguments["grad_output"]
    transposed = bool(arguments.get("transposed", False))
    wants_input, wants_weight, wants_bias = arguments["output_mask"]
    times = [_convolve(way, x, y, w, arguments, transposed, device)
             for way, is_wanted in (("input", wants_input), ("weight", wants_weight)) if is_wanted]
    if wants_bias:
        channels = y[1]
        times.append(reduction_time(channels, y.numel // max(1, channels), y.dtype.itemsize, device,
                                    reduces_fastest=not _is_channels_last(y)))
    return join_known(*times)


def pool_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A window for each result; backward the windows that hold an element, after the gradient is cleared."""
    arguments, name, out = signature.named_arguments(), signature.op._schema.name, signature.outputs[0]
    dimensions = 3 if "3d" in name else 2
    kernel = spread(arguments["kernel_size"], dimensions)
    if "backward" not in name:
        return window_time(out.numel, prod(kernel), moved_bytes(signature), device)
    windows = prod(-(-k // s) for k, s in zip(kernel, spread(arguments.get("stride") or kernel, dimensions)))
    time = window_time(out.numel, 1.5 * windows, moved_bytes(signature), device)
    return join_known(stream_time(out.nbytes, device), time)


def upsample_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Bilinear by a thread a position; nearest (and bicubic, taken to be like it) by a thread an element."""
    out = signature.outputs[0]
    if "bilinear" in signature.op._schema.name:
        return plane_time(out[0] * out[1], prod(out[2:]), moved_bytes(signature), device, prod(signature.inputs[0][2:]))
    return window_time(out.numel, 1, moved_bytes(signature), device)


def upsample_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Into a result of zeros: bilinear (and bicubic, taken to be like it) adds each gradient at four places."""
    gradient, out = signature.inputs[0], signature.outputs[0]
    fill = stream_time(out.nbytes, device)
    if "bilinear" not in signature.op._schema.name and "bicubic" not in signature.op._schema.name:
        return join_known(fill, window_time(gradient.numel, 1, moved_bytes(signature), device))
    return join_known(fill, atomic_time(4 * gradient.numel, 4 * out.numel, moved_bytes(signature), device))


register_times(FORWARD + COLUMNS, time_forward)
register_times("convolution_backward convolution_backward_overrideable _slow_conv2d_backward", time_backward)
register_times("max_pool2d_with_indices max_pool2d_with_indices_backward", with_copies(pool_rule))
register_times("avg_pool2d avg_pool3d max_pool3d_with_indices avg_pool2d_backward", unmeasured(with_copies(pool_rule)))
# each element in a window or two, whichever way
register_times("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d", unmeasured(
    lambda signature, device: window_time(max(signature.inputs[0].numel, signature.outputs[0].numel), 1,
                                          moved_bytes(signature), device)))
register_times("upsample_bilinear2d", upsample_rule)
register_times("upsample_bilinear2d_backward", upsample_backward_rule)
register_times("upsample_nearest2d upsample_bicubic2d _upsample_nearest_exact2d", unmeasured(upsample_rule))
register_times("upsample_nearest2d_backward upsample_bicubic2d_backward", unmeasured(upsample_backward_rule))
