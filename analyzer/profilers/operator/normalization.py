"""Normalizations, softmax and losses: FLOPs, and the time of their kernels."""
from __future__ import annotations

from math import prod
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time import norm as kernels
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.pointwise import lone_block_time, pointwise_time, position_loss_time, stream_time
from analyzer.hardware.kernel_time.reduction import inner_softmax_time, reduction_time, softmax_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .pointwise import is_channels_last, unmeasured, with_copies
from .registration import (
    FlopCount,
    Formula,
    OfSignature,
    bind,
    multiply_adds,
    per_input,
    register_each,
    register_flop_impl,
    register_times,
    tensors,
)

# FLOPs of normalizations and softmax, per element of the input under the convention of pointwise.py.
#
# What is done once per row or channel (÷ n, + ε, the root) is of lower order and left out.

MOMENTS_FLOPS = 4    # sum; x - mean, square, sum
NORMALIZE_FLOPS = 2  # x - mean, × 1/σ
LAYER_NORM_FLOPS = 7  # moments, × 1/σ (x - mean is at hand), × weight, + bias


def affine(weight: Any, bias: Any) -> int:
    return (weight is not None) + (bias is not None)


def norm(centers: int, normalizes: int) -> Formula:
    """The formula of a norm that gives moments (``centers``) and normalizes (input, weight, bias)."""
    return lambda x, weight=None, bias=None, *_, **__: x.numel * (centers + normalizes + affine(weight, bias))


TRAINED, CONSTANT = norm(MOMENTS_FLOPS, 1), norm(0, NORMALIZE_FLOPS)  # x - mean is at hand; statistics are given


# Gradient of x through the moments: x̂ (2), g w (1), Σ g w and Σ g w x̂ (3), ((g w - Σ) - x̂ Σ) / σ (4).
INPUT_GRADIENT_FLOPS = 10
XHAT_FLOPS = 2


def norm_backward_flops(signature: Signature) -> int:
    """Gradients of input, weight (x̂ g summed: 2, and x̂ if not yet at hand) and bias (1). cuDNN and MIOpen give all
    three. In evaluation the statistics are constants: grad × weight / σ.
    """
    named = signature.named_arguments()
    through_moments = bool(named.get("train", named.get("update", True)))
    of_input, of_weight, of_bias = map(bool, named.get("output_mask", (True, True, True)))
    flops = 0
    if of_input:
        flops += (INPUT_GRADIENT_FLOPS if through_moments else 2) - (named.get("weight") is None)
    if of_weight:
        flops += 2 + (0 if of_input and through_moments else XHAT_FLOPS)
    numel: int = named["input"].numel
    return numel * (flops + of_bias)


register_each("native_layer_norm layer_norm", lambda x, _shape, *affine, **__: TRAINED(x, *affine))
register_each("native_group_norm _batch_norm_with_update", TRAINED)
register_each("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit", (
    lambda x, weight, bias, mean, var, training, *_, **__: (TRAINED if training else CONSTANT)(x, weight, bias)))
register_each("_native_batch_norm_legit_no_training _batch_norm_no_update quantized_batch_norm", CONSTANT)
register_each("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward "
              "cudnn_batch_norm_backward miopen_batch_norm_backward", OfSignature(norm_backward_flops))
# Square, sum, × 1/rms, × weight
register_each("_fused_rms_norm rms_norm", lambda x, _shape, weight=None, *_, **__: x.numel * (3 + (weight is not None)))
# Input: x̂ (1), g w (1), Σ g w x̂ (2), (g w - x̂ Σ) / rms (3). Weight: x̂ g summed (2), x̂ at hand or not
register_each("_fused_rms_norm_backward", lambda grad, x, _shape, _rstd, weight, output_mask, *_, **__: x.numel * (
    bool(output_mask[0]) * (7 - (weight is None)) + bool(output_mask[1]) * (3 - bool(output_mask[0]))))
register_each("batch_norm_stats batch_norm_update_stats", per_input(MOMENTS_FLOPS))
register_each("batch_norm_elemt", lambda x, weight, bias, *_, **__: x.numel * (NORMALIZE_FLOPS + affine(weight, bias)))
# Merging the moments of each process, a channel: delta (1), mean (3), second moment (5)
register_each("batch_norm_gather_stats batch_norm_gather_stats_with_counts", lambda _x, mean, *_, **__: 9 * mean.numel)
register_each("batch_norm_backward_reduce", per_input(4))  # x - mean, × grad, two sums
# x - mean, × and - the two sums, × weight / σ: as above, x̂ apart
register_each("batch_norm_backward_elemt", per_input(6))
register_each("_weight_norm_interface", per_input(3))      # square, sum, × g / norm
register_each("_weight_norm_interface_backward", per_input(5))  # Σ grad v (2), (grad - v Σ) × g / norm (3)

register_each(
    "_softmax softmax _log_softmax log_softmax _safe_softmax _masked_softmax _nested_tensor_softmax_with_shape",
    per_input(5))  # maximum, - maximum, exp, sum, and ÷ sum or - log sum
# y (g - Σ g y); of the logarithm g - exp(y) Σ g
register_each("_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward", per_input(4))
register_each("renorm", per_input(3))                      # norm (2), × scale


# FLOPs of losses, per element under the convention of pointwise.py, and 1 more where the result is reduced.

NONE = 0  # of torch.nn._reduction.get_enum; 1 is mean, 2 is sum

# FLOPs to an element before reduction.
LOSS_FLOPS = {
    "mse_loss": 2,          # x - t, square
    "smooth_l1_loss": 5,    # x - t, abs, square, × 0.5, ÷ β
    "huber_loss": 4,        # x - t, abs, × 0.5, × itself (or - δ/2, × δ)
    "soft_margin_loss": 4,  # -t, × x, exp, log1p
}
BACKWARD_FLOPS = {
    "mse_loss": 3,          # x - t, × 2/n, × g
    "smooth_l1_loss": 4,    # x - t, ÷ β, × 1/n, × g
    "huber_loss": 3,
    "soft_margin_loss": 8,  # z = exp(-t x) (3); -t z / (1 + z) × g × 1/n
}


# Joining three states: two maxima, three differences, three exponentials, two sums, log, + maximum; and + the log
# probability.
CTC_STEP_FLOPS = 13
CTC_JOIN_FLOPS = 9
CTC_CLASS_FLOPS = 6


def linear_cross_entropy_flops(x: Spec, weight: Spec, *rest: Any, out: Any = None, **_: Any) -> FlopCount:
    """Takes x [n, d] by weight [classes, d] and a log-softmax (5). Where gradients come with the loss, also the
    products for those of x and of the weight, and of each logit's exp(x - log sum), - target, × g (4).
    """
    wanted = [bool(flag) for flag in rest[10:12]]  # compute_input_grad, compute_linear_weight_grad
    logits = x.numel // x[-1] * weight[0]
    return multiply_adds(logits * x[-1] * (1 + sum(wanted)), x) + FlopCount(logits * (9 if any(wanted) else 5))


# for each element of what x and target broadcast to
for _name, _flops in LOSS_FLOPS.items():
    register_each(_name, lambda x, target, reduction=1, *_, flops=_flops, **__: (
        max(x.numel, target.numel) * (flops + (reduction != NONE))))
for _name, _flops in BACKWARD_FLOPS.items():
    register_each(f"{_name}_backward", lambda grad, x, target, *_, flops=_flops, **__: (
        max(x.numel, target.numel) * flops))
# (t - 1) max(log(1 - x), -100) - t max(log x, -100): 9 with the negation inside log1p, and a weight's product
register_each("binary_cross_entropy",
    lambda x, target, weight=None, reduction=1, *_, **__: x.numel * (9 + (weight is not None) + (reduction != NONE)))
# g (x - t) / max((1 - x) x, ε), × weight, ÷ n for a mean
register_each("binary_cross_entropy_backward",
    lambda grad, x, target, weight=None, reduction=1, *_, **__: x.numel * (6 + (weight is not None) + (reduction == 1)))
# (1 - t) x - logsigmoid(x) (6): 9; a positive weight makes it × ((p - 1) t + 1): 4 more
register_each("binary_cross_entropy_with_logits",
    lambda x, target, weight=None, pos_weight=None, reduction=1, *_, **__: (
        x.numel * (9 + 4 * (pos_weight is not None) + (weight is not None) + (reduction != NONE))))
# Per target: a negation and a sum; with weights a product and the sum of weights
register_each("nll_loss_forward nll_loss2d_forward", lambda x, target, weight=None, reduction=1, *_, **__: (
    target.numel * (1 + (weight is not None) + (reduction != NONE) * (1 + (weight is not None)))))
# Per target: -g, ÷ the total weight for a mean, × weight
register_each("nll_loss_backward nll_loss2d_backward", lambda grad, x, target, weight=None, reduction=1, *_, **__: (
    target.numel * (1 + (reduction == 1) + (weight is not None))))
# Per class: margin - x_t + x_j, maximum, sum (4); × itself for p = 2; × weight
register_each("multi_margin_loss",
    lambda x, target, p=1, margin=1, weight=None, *_, **__: x.numel * (4 + int(p == 2) + int(weight is not None)))
# The margin again (3), × g, its sum into the target's; × 2 z for p = 2 (2); × weight
register_each("multi_margin_loss_backward",
    lambda grad, x, target, p, margin, weight=None, *_, **__: x.numel * (5 + 2 * int(p == 2) + int(weight is not None)))
# 1 - x_t + x_j, maximum, sum for each target and class; the number of targets is data, taken at its most
register_each("multilabel_margin_loss_forward", lambda x, *_, **__: 4 * x.numel * (x[-1] if len(x) else 1))
register_each("multilabel_margin_loss_backward", lambda grad, x, *_, **__: 4 * x.numel * (x[-1] if len(x) else 1))
register_flop_impl.add("torch_nn::_linear_cross_entropy_batch_chunked", linear_cross_entropy_flops)
register_flop_impl.add("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", linear_cross_entropy_flops)
# Each (sample, time, state) of alpha, the second output, joins three states (Graves 2006, equation 6)
register_each("_ctc_loss", lambda *_, out, **__: CTC_STEP_FLOPS * list(tensors(out))[1].numel)
# Beta as alpha; both joined by label (1 + logsumexp of two, 8); (exp(x) - exp(joined + loss - x)) g a class
register_each("_ctc_loss_backward",
    lambda grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, *_, **__: (
        (CTC_STEP_FLOPS + CTC_JOIN_FLOPS) * log_alpha.numel + CTC_CLASS_FLOPS * log_probs.numel))
# Loss and gradient at once; states are 2 labels + 1, the labels as in targets
register_each("_cudnn_ctc_loss miopen_ctc_loss", lambda log_probs, targets, *_, **__: (
    (2 * CTC_STEP_FLOPS + CTC_JOIN_FLOPS) * log_probs[0] * (2 * targets.numel + log_probs[1])
    + CTC_CLASS_FLOPS * log_probs.numel))


# The time of normalizations, softmax and losses.

def layer_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Rows of the normalized shape; backward the input's gradient, and those of weight and bias, as the mask says."""
    named = bind(signature)
    source, columns, mask = named["input"], prod(named["normalized_shape"]), named.get("output_mask")
    sizes = source.numel // max(columns, 1), columns, source.dtype.itemsize, device
    if mask is None:
        return kernels.layer_norm_time(*sizes, signature.outputs[0].dtype.itemsize)
    return kernels.layer_norm_backward_time(*sizes, of_input=bool(mask[0]), of_weight=any(mask[1:]))


def group_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Moments of groups, scale and shift of channels, an addressed pointwise kernel (``group_norm_kernel.cu``)."""
    source = signature.inputs[0]
    groups = source[0] * bind(signature)["group"]
    return join_known(kernels.moments_time(groups, source.numel // max(groups, 1), source.dtype.itemsize, device),
                  stream_time(0, device),
                  pointwise_time(source.numel, 2 * source.nbytes, device, dimensions=2, operands=4))


def group_norm_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Sums over each channel, factors of each channel, a pointwise kernel, and the gradients of weight and bias."""
    source = signature.inputs[1]
    channels = source[0] * source[1]
    return join_known(reduction_time(channels, 2 * source.numel // max(channels, 1), source.dtype.itemsize, device),
                  stream_time(0, device, kernels=2),
                  pointwise_time(source.numel, 3 * source.nbytes, device, dimensions=3, operands=6),
                  stream_time(0, device))


def batch_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """CuDNN's kernels where the operator's name says so, or in float32 of more than two dimensions."""
    name, (source, *others) = signature.op._schema.name, signature.inputs
    backward = "backward" in name
    if backward and len(source) < 2:
        source = others[0]
    training = "with_update" in name or bool(bind(signature).get("training", "no_" not in name))
    sizes = source[0], source[1], prod(source[2:]), source.dtype.itemsize, device  # images, channels and positions
    if is_channels_last(source):
        return kernels.channels_last_norm_time(source.nbytes, device, training=training, backward=backward)
    if "cudnn" in name or "with_update" in name and source.dtype is torch.float32 and len(source) > 2:
        return kernels.cudnn_batch_norm_time(*sizes, backward=backward) if training else (
            kernels.cudnn_normalize_time(*sizes))
    return kernels.native_batch_norm_backward_time(*sizes) if backward else (
        kernels.native_batch_norm_time(*sizes, training=training))


def softmax_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The kernel; backward of softmax the product of gradient and result before it."""
    name, out = signature.op._schema.name, signature.outputs[0]
    backward = "backward" in name
    source = signature.inputs[1 if backward else 0]
    dim = bind(signature)["dim"] % max(len(source), 1)
    outer, size, inner = prod(source[:dim]), source[dim] if len(source) else 1, prod(source[dim + 1:])
    options: dict[str, Any] = {"written_itemsize": out.dtype.itemsize, "backward": backward}
    kernel = softmax_time(outer, size, source.dtype.itemsize, device, **options) if inner <= 1 else inner_softmax_time(
        outer, size, inner, source.dtype.itemsize, device, **options)
    return kernel if not backward or "log" in name else join_known(kernel, stream_time(3 * source.nbytes, device))


def safe_softmax_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Softmax, and zeros for rows of nothing but minus infinity (``attention.cpp``: ``_safe_softmax``)."""
    source, out = signature.inputs[0], signature.outputs[0]
    rows = source.numel // max(source[-1], 1)
    return join_known(
        softmax_rule(signature, device),
        pointwise_time(source.numel, source.nbytes + source.numel, device),  # which are minus infinity
        reduction_time(rows, source[-1], 1, device),
        stream_time(0, device),
        pointwise_time(source.numel, source.nbytes + out.nbytes, device, dimensions=2, operands=4))


def elementwise_loss_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A pointwise kernel that writes each term, and their sum."""
    source = signature.inputs[0]
    terms = stream_time(sum(s.nbytes for s in signature.inputs) + source.nbytes, device)
    if bind(signature).get("reduction") == 0 or terms is None:
        return terms
    return join_known(terms, reduction_time(1, source.numel, source.dtype.itemsize, device))


def nll_loss_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One element a target by one block, or a position by a block an image. Backward into a result of zeros."""
    name, target = signature.op._schema.name, bind(signature)["target"]
    backward = "backward" in name
    if "2d" in name:
        kernel = position_loss_time(target[0], target.numel // max(target[0], 1), device)
    else:
        kernel = lone_block_time(target.numel, device, *([0.5] if backward else []))
    return join_known(stream_time(signature.outputs[0].nbytes, device), kernel) if backward else kernel


register_times("native_layer_norm _fused_rms_norm native_layer_norm_backward _fused_rms_norm_backward",
               with_copies(layer_norm_rule))
register_times("native_group_norm", unmeasured(with_copies(group_norm_rule)))
register_times("native_group_norm_backward", unmeasured(with_copies(group_norm_backward_rule)))
register_times("native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update "
               "_batch_norm_no_update _native_batch_norm_legit_no_training native_batch_norm_backward "
               "cudnn_batch_norm_backward batch_norm_backward", batch_norm_rule)
register_times("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", with_copies(softmax_rule))
register_times("_safe_softmax", with_copies(safe_softmax_rule))
register_times("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss",
               unmeasured(elementwise_loss_rule))
register_times("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", nll_loss_rule)
