"""Optimizer steps and other operators over lists of tensors: FLOPs of the fused ones, and their kernels."""
from __future__ import annotations

from functools import partial
from typing import Any

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, find_constants, join_known
from analyzer.hardware.kernel_time.pointwise import count_launches, foreach_time, stream_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec
from analyzer.profilers.traffic import plan_of

from .pointwise import unmeasured
from .registration import Formula, is_list, register_each, register_flop_impl, register_times

# Fused optimizer steps, per parameter element; what depends on the step alone (bias corrections) is left out.
#
# Options that are off cost nothing: weight decay 0, momentum 0, amsgrad, a gradient scale (÷ scale), maximize
# (negation).

def elements(parameters: list[Spec]) -> int:
    return sum(p.numel for p in parameters)


def gradient_flops(maximize: bool, grad_scale: Any) -> int:
    return bool(maximize) + (grad_scale is not None)


def adam(decay_flops: int) -> Formula:
    """m: lerp (3); v: β₂ v + (1 - β₂) g g (4); √v ÷ c + ε (3); p - step × m ÷ that (3); amsgrad's maximum (1)."""
    return lambda params, *_, weight_decay=0.0, amsgrad=False, maximize=False, grad_scale=None, **__: (
        (13 + (decay_flops if weight_decay else 0) + bool(amsgrad) + gradient_flops(maximize, grad_scale))
        * elements(params))


def sgd_flops(params: list[Spec], *_: Any, weight_decay: float = 0.0, momentum: float = 0.0, dampening: float = 0.0,
              nesterov: bool = False, maximize: bool = False, is_first_step: bool = False, grad_scale: Any = None,
              out: Any = None, **__: Any) -> int:
    """Counts p - lr g (2); g + λ p (2); μ b + (1 - d) g (2; 3 with dampening; first a copy); Nesterov's g + μ b (2)."""
    of_momentum = 0
    if momentum:
        of_momentum = (0 if is_first_step else 3 if dampening else 2) + (2 if nesterov else 0)
    return elements(params) * (2 + (2 if weight_decay else 0) + of_momentum + gradient_flops(maximize, grad_scale))


register_each("_fused_adam", adam(decay_flops=2))   # g + λ p
register_each("_fused_adamw", adam(decay_flops=1))  # p × (1 - lr λ)
register_each("_fused_sgd", sgd_flops)
# sum + g g (2); p - lr × g ÷ (√sum + ε) (5); g + λ p (2)
register_each("_fused_adagrad", lambda params, *_, weight_decay=0.0, maximize=False, grad_scale=None, **__: (
    elements(params) * (7 + (2 if weight_decay else 0) + gradient_flops(maximize, grad_scale))))
register_each("_amp_foreach_non_finite_check_and_unscale", lambda grads, *_, **__: elements(grads))  # grad × 1/scale
register_each("_amp_update_scale", lambda scale, *_, **__: scale.numel)  # × growth or × backoff

# bitsandbytes', by name: FLOPs per element, those of weight decay, and states (csrc/kernels.cu, kOptimizer32bit1State
# and 2State). Adam's are those of `adam`; Lion: β₁ m + (1 - β₁) g (3), p - lr × its sign (2), m (3); RMSprop: v (4),
# p - lr × g ÷ (√v + ε) (5); Adagrad: sum + g g (2) and the same 5; momentum: β m + g (2), p - lr m (2).
_UPDATES = {"adam": (13, 1, 2), "lion": (8, 1, 1), "rmsprop": (9, 2, 1), "adagrad": (7, 2, 1), "momentum": (4, 2, 1)}


def _update_flops(decay_at: int, quantizes: int) -> Formula:
    """One parameter's update; each state may be dequantized and quantized again (1 each). None of another optimizer."""
    def update_flops(name: str, gradient: Spec, *rest: Any, **__: Any) -> int | None:
        if name not in _UPDATES:
            return None
        each, of_decay, states = _UPDATES[name]
        return gradient.numel * (each + (of_decay if rest[decay_at] else 0) + quantizes * states)

    return update_flops


register_flop_impl.add("bitsandbytes::optimizer_update_32bit", _update_flops(11, 0))
register_flop_impl.add("bitsandbytes::optimizer_update_8bit_blockwise", _update_flops(14, 2))

# Those of `recipe/optimizer.py`: AdamW's 14 an element; each of 8-bit states is dequantized and quantized again.
register_flop_impl.add("analyzer::adamw_8bit", lambda parameter, *_, **__: 18 * parameter.numel)
register_flop_impl.add("analyzer::adamw_32bit", lambda parameter, *_, **__: 14 * parameter.numel)


# The time of operators over lists: ``_foreach_*`` and the fused optimizers.

def foreach_rule(signature: Signature, device: DeviceSpec, arithmetic: float = 0.0) -> KernelTime | None:
    """As many launches as the lists need; arithmetic in instructions of one element."""
    lists = [a for a in (*signature.args, *signature.kwargs.values()) if is_list(a) and a and isinstance(a[0], Spec)]
    lists = [a for a in lists if elements(a) > len(a)]  # not counters
    plan, name = plan_of(signature), signature.op._schema.name
    if not lists:
        return stream_time(plan.total.written_bytes, device)
    if name.startswith("aten::_foreach_addcmul") and lists[1:2] == lists[2:3]:
        lists = lists[:2]  # a square: optimizers give the gradients twice
    sizes = [x.numel for x in lists[0]]
    if not sum(sizes):
        return NO_TIME
    read = sum(plan.reads) if len(lists) * len(sizes) >= len(plan.reads) else sum(x.nbytes for a in lists for x in a)
    per_element = (read + plan.total.written_bytes) / sum(sizes)
    accesses, constants = per_element / lists[0][0].dtype.itemsize, find_constants("memory_bound", device)
    instructions = constants["list_instructions"] + accesses * constants["list_access_instructions"] + arithmetic
    return foreach_time(sizes, per_element, len(lists) + (0 if name.endswith("_") else 1), device,
                        instructions=instructions)


def foreach_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Partial sums of each chunk, then a block a tensor."""
    tensors = signature.inputs
    if not tensors:
        return NO_TIME
    partial_sums = foreach_time([t.numel for t in tensors], tensors[0].dtype.itemsize, 1, device)
    rest = stream_time(4 * len(tensors), device, kernels=1 + count_launches([1] * len(tensors), 1))
    return join_known(partial_sums, rest)


FOREACH = """abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1
floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh
sqrt sub tan tanh trunc zero""".split()
register_times("_foreach_norm", unmeasured(foreach_norm_rule))
for _name in FOREACH:
    register_times(f"_foreach_{_name} _foreach_{_name}_", foreach_rule)
# Instructions of the arithmetic of fused optimizers, roots and divisions among them (``fused_adam_utils.cuh``).
register_times("_fused_adam_ _fused_adamw_", partial(foreach_rule, arithmetic=60))
register_times("_fused_sgd_", partial(foreach_rule, arithmetic=10))
register_times("_fused_adagrad_", partial(foreach_rule, arithmetic=40))
