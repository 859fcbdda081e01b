"""FLOPs of reductions, normalizations and losses."""
from __future__ import annotations

from math import ceil, log2
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .pointwise import COMPLEX_FLOPS
from .registration import (
    FlopCount,
    Formula,
    indexed_elements,
    multiply_adds,
    per_input,
    register_each,
    register_flop_impl,
    tensors,
)

# Reductions, scans, sorts, distances and sums by index (embedding bags among them).
#
# A reduction counts the operations on each input element, its accumulation among them (so a sum of n counts n);
# what is done once per result is left out, but for a mean, whose n - 1 sums and one quotient make n exactly.
# Finding an extreme counts its comparisons; a boolean result (any, all, count_nonzero) counts none.

# FLOPs to one input element.
REDUCTION_FLOPS = {
    "sum": 1, "nansum": 1, "mean": 1, "prod": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1,
    "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "_cummax_helper": 1, "_cummin_helper": 1, "sum_to_size": 1,
    "aminmax": 2, "_aminmax": 2,
    "var": 4, "std": 4, "var_mean": 4, "std_mean": 4,   # mean's sum; x - mean, square, sum
    "logsumexp": 4,                                     # maximum, - maximum, exp, sum
    "_logcumsumexp": 7, "logcumsumexp": 7,              # a logaddexp each
    # - lowest, × bins / range, count
    "histc": 3, "histogram": 3, "_histogramdd_from_bin_cts": 3, "_histogramdd_from_bin_tensors": 3,
    "_histogramdd_bin_edges": 2,                        # lowest and highest
    "segment_reduce": 1, "bincount": 1}


def reduction(name: str, flops: int) -> Formula:
    """The formula of ``flops`` operations for each input element."""
    return lambda x, *_, **__: flops * x.numel * (COMPLEX_FLOPS.get(name, 2) if x.dtype.is_complex else 1)


def norm_flops(x: Spec, order: Any = 2, *_: Any, out: Any = None, **__: Any) -> int:
    """|x|ᵖ and its sum: 2 FLOPs an element for p of 1, 2 or infinity, 3 (abs, pow, +) for others."""
    simple = order is None or order in (0, 1, 2, float("inf"), float("-inf"))
    return x.numel * (2 if simple else 3) * (2 if x.dtype.is_complex else 1)


def sorted_flops(x: Spec, *args: Any, out: Any = None, **kwargs: Any) -> int:
    """A comparison sort of each row: n ⌈log₂ n⌉ comparisons (Knuth, TAOCP 3, 5.3.1). CUDA's radix sorts do none.

    >>> import torch
    >>> sorted_flops(Spec.of((3, 8), (8, 1), torch.float32, "cpu"))
    72
    """
    dim = next((int(a) for a in (*args, kwargs.get("dim")) if isinstance(a, int) and not isinstance(a, bool)), -1)
    return whole_rows_flops(x, x[dim] if x else 1)


def whole_rows_flops(x: Spec, row: int) -> int:
    """FLOPs of whole rows."""
    return x.numel * ceil(log2(row)) if row > 1 else 0


def multinomial_flops(probabilities: Spec, num_samples: int, replacement: bool = False, *_: Any, out: Spec,
                      **__: Any) -> int:
    """Without replacement: p ÷ exponential (3), largest of each row; with: cumulative sums (2), binary search."""
    if not replacement or num_samples == 1:
        return 5 * probabilities.numel
    return 2 * probabilities.numel + out.numel * ceil(log2(probabilities[-1] + 1))


def search_flops(sorted_sequence: Any, values: Any, *_: Any, out: Spec, **__: Any) -> int:
    """Binary search: ⌈log₂(n + 1)⌉ comparisons a value."""
    return out.numel * ceil(log2(sorted_sequence[-1] + 1))


def index_put_flops(self: Spec, indices: Any, values: Spec, accumulate: bool = False, *_: Any, out: Any = None,
                    **__: Any) -> int:
    """Moves elements; accumulating adds one for each element addressed.

    A boolean index addresses a number of elements that is data: those of ``values`` stand for it.

    >>> import torch
    >>> grid, i = (Spec.of(s, (1,) * len(s), t, "cpu") for s, t in (((5, 7), torch.float32), ((3,), torch.int64)))
    >>> [index_put_flops(grid, *args) for args in (([i], grid, True), ([None, i], grid, True), ([i], grid))]
    [21, 15, 0]
    """
    if not accumulate:
        return 0
    addressed = indexed_elements(self, indices)
    return values.numel if addressed is None else addressed


def pair_flops(p: float) -> int:
    """An element of a pair: difference, |·| or square, + (or maximum); pow too for other exponents; a count for 0."""
    return 3 if p in (1, 2, float("inf")) else 1 if p == 0 else 4


def cdist_backward_flops(grad: Spec, x1: Spec, x2: Spec, p: float, *_: Any, out: Any = None, **__: Any) -> int:
    """Difference, ÷ distance and × grad, + : 4; two more (abs, pow) for other exponents."""
    return grad.numel * x1[-1] * (0 if p == 0 else 4 if p in (1, 2, float("inf")) else 6)


def bag_gradient_flops(grad: Spec, indices: Spec, mode: int, weights: Any) -> FlopCount:
    """Each index adds its bag's gradient, ÷ the bag's size in mode 1, × a weight if given; mode 2 adds once a bag."""
    if mode == 2:
        return FlopCount(grad.numel)
    elements = indices.numel * grad[-1]
    return multiply_adds(elements) if weights is not None else FlopCount(elements * (2 if mode == 1 else 1))


for _name, _flops in REDUCTION_FLOPS.items():
    register_each(_name, reduction(_name, _flops))
del _name, _flops
register_each("linalg_vector_norm norm native_norm linalg__powsum", norm_flops)
register_each("dist", lambda x, other, p=2, *_, **__: x.numel + norm_flops(x, p))  # The norm of a difference
register_each("trace", lambda x, *_, **__: min(x))
register_each("sort argsort mode unique_dim", sorted_flops)
register_each("topk kthvalue", lambda x, k, dim=-1, *_, **__: whole_rows_flops(x, x[dim] if x else 1))
# The median over a dimension, or over all
register_each("median nanmedian",
    lambda x, *args, **__: sorted_flops(x, *args) if args else whole_rows_flops(x, x.numel))
register_each("_unique _unique2", lambda x, *_, **__: whole_rows_flops(x, x.numel))
register_each("multinomial", multinomial_flops)
register_each("searchsorted", search_flops)
register_each("bucketize", lambda values, boundaries, *_, out, **__: search_flops(boundaries, values, out=out))
# One sum an element of the source, and a product where alpha is not 1
register_each("index_add", lambda _self, _dim, _index, source, alpha=1, *_, **kwargs: (
    source.numel * (1 if kwargs.get("alpha", alpha) == 1 else 2)))
# Moves elements; with ``reduce``, one operation for each index
register_each("scatter", lambda _self, _dim, index, *_, reduce=None, **__: 0 if reduce is None else index.numel)
register_each("scatter_add scatter_reduce", lambda _self, _dim, index, *_, **__: index.numel)
register_each("index_reduce _unsafe_masked_index_put_accumulate", per_input(1, position=3))
register_each("index_put _index_put_impl _unsafe_index_put", index_put_flops)
register_each("put", lambda _self, index, _source, accumulate=False, *_, **__: index.numel if accumulate else 0)
register_each("_segment_reduce_backward", per_input(1, position=2))
register_each("embedding_dense_backward unfold_backward", per_input(1))  # gradients summed into place
register_each(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "max_pool2d_backward mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "col2im", per_input(1))
# Distances between the rows of x1 [..., p, m] and x2 [..., r, m]
register_each("_cdist_forward", lambda x1, x2, p, *_, out, **__: out.numel * x1[-1] * pair_flops(p))
register_each("_cdist_backward", cdist_backward_flops)
register_each("_pdist_forward", lambda x, p=2, *_, out, **__: out.numel * x[-1] * pair_flops(p))
register_each("_pdist_backward", lambda grad, x, p, *_, **__: cdist_backward_flops(grad, x, x, p))
# √ of [-2 x1, |x1|², 1]·[x2, 1, |x2|²]: a product of m + 2 columns, the squared norms, × -2, maximum and root
register_each("_euclidean_dist", lambda x1, x2, *_, out, **__: (
    multiply_adds(out.numel * (x1[-1] + 2), x1) + FlopCount(3 * x1.numel + 2 * x2.numel + 2 * out.numel)))
# A plain embedding moves rows and does no arithmetic
# Each index adds a row (mode 0), adds it to a mean (1) or compares it (2); with weights it is a multiply-add
register_each("_embedding_bag _embedding_bag_forward_only embedding_bag",
    lambda table, indices, offsets, scaled=False, mode=0, sparse=False, weights=None, *_, **__: (
        (FlopCount if weights is None else multiply_adds)(indices.numel * table[-1])))
register_each("_embedding_bag_backward",
    lambda grad, indices, offsets, bags, sizes, maximum, rows, scaled, mode, sparse=False, weights=None, *_, **__: (
        bag_gradient_flops(grad, indices, mode, weights)))
register_each("_embedding_bag_dense_backward",
    lambda grad, indices, bags, sizes, maximum, rows, scaled, mode, weights=None, *_, **__: (
        bag_gradient_flops(grad, indices, mode, weights)))
# The dot product of a row and its bag's gradient, for each index
register_each("_embedding_bag_per_sample_weights_backward",
    lambda grad, weight, indices, *_, **__: multiply_adds(indices.numel * weight[-1]))
# Norm (2) and scale (1) of each row addressed, taken as distinct and all over the limit
register_each("embedding_renorm", lambda weight, indices, *_, **__: 3 * indices.numel * weight[-1])


# Normalizations and softmax, per element of the input under the convention of pointwise.py.
#
# What is done once per row or channel (÷ n, + ε, the root) is of lower order and left out.

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


# Losses, per element under the convention of pointwise.py, and 1 more where the result is reduced.

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


def elementwise_loss(flops: int) -> Formula:
    """The formula of ``flops`` operations for each element of what x and target broadcast to, and the reduction."""
    return lambda x, target, reduction=1, *_, **__: max(x.numel, target.numel) * (flops + (reduction != NONE))


def elementwise_loss_backward(flops: int) -> Formula:
    """The formula of its gradient."""
    return lambda grad, x, target, *_, **__: max(x.numel, target.numel) * flops


# Joining three states: two maxima, three differences, three exponentials, two sums, log, + maximum; and + the log
# probability.
CTC_STEP_FLOPS = 13
CTC_JOIN_FLOPS = 9
CTC_CLASS_FLOPS = 6


def vendor_ctc_flops(log_probs: Spec, targets: Spec, *_: Any, out: Any, **__: Any) -> int:
    """In cuDNN and MIOpen: loss and gradient at once; states are 2 labels + 1, the labels as in targets."""
    time, samples = log_probs[0], log_probs[1]
    states = time * (2 * targets.numel + samples)
    return (2 * CTC_STEP_FLOPS + CTC_JOIN_FLOPS) * states + CTC_CLASS_FLOPS * log_probs.numel


def linear_cross_entropy_flops(x: Spec, weight: Spec, *rest: Any, out: Any = None, **_: Any) -> FlopCount:
    """Takes x [n, d] by weight [classes, d] and a log-softmax (5).

    Where gradients come with the loss, also the products for those of x and of the weight, and of each logit's
    exp(x - log sum), - target, × g (4).
    """
    wanted = [bool(flag) for flag in rest[10:12]]  # compute_input_grad, compute_linear_weight_grad
    logits = x.numel // x[-1] * weight[0]
    return multiply_adds(logits * x[-1] * (1 + sum(wanted)), x) + FlopCount(logits * (9 if any(wanted) else 5))


for _name, _flops in LOSS_FLOPS.items():
    register_each(_name, elementwise_loss(_flops))
for _name, _flops in BACKWARD_FLOPS.items():
    register_each(f"{_name}_backward", elementwise_loss_backward(_flops))
del _name, _flops
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
register_each("multilabel_margin_loss_forward", lambda x, *_, **__: 4 * x.numel * (x[-1] if x else 1))
register_each("multilabel_margin_loss_backward", lambda grad, x, *_, **__: 4 * x.numel * (x[-1] if x else 1))
register_flop_impl("torch_nn::_linear_cross_entropy_batch_chunked", linear_cross_entropy_flops)
register_flop_impl("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", linear_cross_entropy_flops)
# Each (sample, time, state) of alpha, the second output, joins three states (Graves 2006, equation 6)
register_each("_ctc_loss", lambda *_, out, **__: CTC_STEP_FLOPS * list(tensors(out))[1].numel)
# Beta as alpha; both joined by label (1 + logsumexp of two, 8); (exp(x) - exp(joined + loss - x)) g a class
register_each("_ctc_loss_backward",
    lambda grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, *_, **__: (
        (CTC_STEP_FLOPS + CTC_JOIN_FLOPS) * log_alpha.numel + CTC_CLASS_FLOPS * log_probs.numel))
register_each("_cudnn_ctc_loss miopen_ctc_loss", vendor_ctc_flops)
