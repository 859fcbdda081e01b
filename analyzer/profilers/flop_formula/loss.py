"""Losses, per element under the convention of pointwise.py, and 1 more where the result is reduced."""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, Formula, register_each, register_flop_impl
from .size import multiply_adds, tensors

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
