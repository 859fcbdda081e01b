"""Normalizations and softmax, per element of the input under the convention of pointwise.py.

What is done once per row or channel (÷ n, + ε, the root) is of lower order and left out.
"""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import Formula, register_each
from .size import per_input

MOMENTS_FLOPS = 4    # sum; x - mean, square, sum
NORMALIZE_FLOPS = 2  # x - mean, × 1/σ
LAYER_NORM_FLOPS = 7  # moments, × 1/σ (x - mean is at hand), × weight, + bias


def affine(weight: Any, bias: Any) -> int:
    """× weight and + bias, where given."""
    return (weight is not None) + (bias is not None)


def layer_norm_flops(x: Spec, _shape: Any, weight: Any = None, bias: Any = None, *_: Any, out: Any = None,
                     **__: Any) -> int:
    """>>> import torch
    >>> x, w = (Spec.of(s, (1,) * len(s), torch.float32, "cpu") for s in ((8, 16), (16,)))
    >>> layer_norm_flops(x, [16], w, w, 1e-5), layer_norm_flops(x, [16], None, None, 1e-5)
    (896, 640)
    """
    return x.numel * (MOMENTS_FLOPS + 1 + affine(weight, bias))


def batch_norm(training_at: int | None, training: bool = False) -> Formula:
    """Batch norm (input, ...) whose flag is argument ``training_at``, or that is always or never ``training``."""
    def batch_norm_flops(x: Spec, weight: Any = None, bias: Any = None, *rest: Any, out: Any = None, **_: Any) -> int:
        trains = rest[training_at - 3] if training_at is not None else training
        return x.numel * ((MOMENTS_FLOPS + 1 if trains else NORMALIZE_FLOPS) + affine(weight, bias))

    return batch_norm_flops


# Gradient of x through the moments: x̂ (2), g w (1), Σ g w and Σ g w x̂ (3), ((g w - Σ) - x̂ Σ) / σ (4).
INPUT_GRADIENT_FLOPS = 10
XHAT_FLOPS = 2


def norm_backward_flops(numel: int, output_mask: Any, weight: Any, through_moments: bool = True) -> int:
    """Gradients of input, weight (x̂ g summed: 2, and x̂ if not yet at hand) and bias (1)."""
    of_input, of_weight, of_bias = (bool(m) for m in output_mask)
    flops = 0
    if of_input:
        flops += (INPUT_GRADIENT_FLOPS if through_moments else 2) - (weight is None)
    if of_weight:
        flops += 2 + (0 if of_input and through_moments else XHAT_FLOPS)
    return numel * (flops + of_bias)


def rms_norm_backward_flops(grad: Spec, x: Spec, _shape: Any, _rstd: Any, weight: Any, output_mask: Any, *,
                            out: Any = None, **_: Any) -> int:
    """Input: x̂ (1), g w (1), Σ g w x̂ (2), (g w - x̂ Σ) / rms (3). Weight: x̂ g summed (2), x̂ at hand or not."""
    of_input, of_weight = (bool(m) for m in output_mask)
    return x.numel * (of_input * (7 - (weight is None)) + of_weight * (2 + (not of_input)))


register_each("native_layer_norm layer_norm", layer_norm_flops)
register_each("native_layer_norm_backward", lambda grad, x, _shape, _mean, _rstd, weight, bias, output_mask, *_, **__: (
    norm_backward_flops(x.numel, output_mask, weight)))
register_each("native_group_norm",
    lambda x, weight=None, bias=None, *_, **__: x.numel * (MOMENTS_FLOPS + 1 + affine(weight, bias)))
register_each("native_group_norm_backward",
    lambda grad, x, _mean, _rstd, weight, n, c, hxw, group, output_mask, *_, **__: (
        norm_backward_flops(x.numel, output_mask, weight)))
# Square, sum, × 1/rms, × weight
register_each("_fused_rms_norm rms_norm", lambda x, _shape, weight=None, *_, **__: x.numel * (3 + (weight is not None)))
register_each("_fused_rms_norm_backward", rms_norm_backward_flops)
register_each("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit",
              batch_norm(training_at=5))
register_each("_native_batch_norm_legit_no_training _batch_norm_no_update quantized_batch_norm",
              batch_norm(None, training=False))
register_each("_batch_norm_with_update", batch_norm(None, training=True))
# In evaluation the statistics are constants: grad × weight / σ
register_each("native_batch_norm_backward batch_norm_backward",
    lambda grad, x, weight, _mean, _var, _save_mean, _save_invstd, train, eps, output_mask, *_, **__: (
        norm_backward_flops(x.numel, output_mask, weight, through_moments=bool(train))))
# In cuDNN and MIOpen: they give all three gradients
register_each("cudnn_batch_norm_backward miopen_batch_norm_backward",
    lambda x, grad, weight, *_, **__: norm_backward_flops(x.numel, (True, True, True), weight))
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
register_each("_softmax_backward_data", per_input(4))      # y (g - Σ g y)
register_each("_log_softmax_backward_data", per_input(4))  # g - exp(y) Σ g
register_each("_masked_softmax_backward", per_input(4))
register_each("renorm", per_input(3))                      # norm (2), × scale
