"""Fused optimizer steps, per parameter element; what depends on the step alone (bias corrections) is left out.

Options that are off cost nothing: weight decay 0, momentum 0, amsgrad, a gradient scale (÷ scale), maximize (negation).
"""
from __future__ import annotations

from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import Formula, register_each


def elements(parameters: list[Spec]) -> int:
    """Elements of all parameters."""
    return sum(p.numel for p in parameters)


def gradient_flops(maximize: bool, grad_scale: Any) -> int:
    """FLOPs of gradient."""
    return bool(maximize) + (grad_scale is not None)


def adam(decay_flops: int) -> Formula:
    """m: lerp (3); v: β₂ v + (1 - β₂) g g (4); √v ÷ c + ε (3); p - step × m ÷ that (3); amsgrad's maximum (1)."""
    def adam_flops(params: list[Spec], *_: Any, weight_decay: float = 0.0, amsgrad: bool = False,
                   maximize: bool = False, grad_scale: Any = None, out: Any = None, **__: Any) -> int:
        each = 13 + (decay_flops if weight_decay else 0) + bool(amsgrad) + gradient_flops(maximize, grad_scale)
        return each * elements(params)

    return adam_flops


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
