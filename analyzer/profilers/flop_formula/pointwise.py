"""FLOPs of pointwise operators, optimizers and Fourier transforms."""
from __future__ import annotations

from math import log2, prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import Formula, components, first, per_input, register_each, register_flop_impl

# Operators that work on each element alone.
#
# The convention: one FLOP for each elementary operation that an output element needs. Elementary are + - × ÷,
# negation,
# absolute value, sign, rounding to an integer, minimum and maximum (so ReLU), remainder, and each function that libm
# or
# CUDA's math library gives in one call: exp, log, pow, square root, erf, tanh, lgamma and so on, sigmoid and the
# special
# functions too. Comparing into a boolean and choosing between values (where, masked_fill, the gradient of ReLU) are
# free,
# constants are folded, and of a piecewise function the longest branch counts. A complex element counts each operation
# once a part, save COMPLEX_FLOPS.

# Each line gives the operations in order; a name without a line is one elementary operation.
ELEMENTARY = """
    mul div true_divide multiply divide floor_divide remainder fmod neg negative abs absolute sgn sign reciprocal sqrt
    rsqrt square pow float_power exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh
    acosh atanh atan2 erf erfc erfinv sigmoid lgamma digamma polygamma i0 igamma igammac ceil floor round trunc fix frac
    frexp copysign nextafter hypot cbrt maximum minimum fmax fmin clamp_min clamp_max relu angle deg2rad rad2deg
    conj_physical _conj_physical special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_spherical_bessel_j0 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_i0e
    special_i1 special_i1e special_erfcx special_ndtri special_log_ndtr special_zeta special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w bessel_i0 bessel_i0e bessel_i1
    bessel_i1e bessel_j0 bessel_j1 spherical_bessel_j0 erfcx erf_inv ndtri zeta _standard_gamma_grad _dirichlet_grad"""

POINTWISE_FLOPS = dict.fromkeys(ELEMENTARY.split(), 1) | {
    "leaky_relu": 1, "leaky_relu_backward": 1, "_prelu_kernel": 1, "prelu": 1,   # × slope
    "_prelu_kernel_backward": 2,           # grad × weight, grad × x
    "rrelu_with_noise": 1, "rrelu_with_noise_backward": 1, "softshrink": 1,
    "hardtanh": 2, "relu6": 2,             # maximum, minimum
    "_add_relu": 2,
    "ldexp": 2,                            # 2ⁿ, ×
    "xlogy": 2, "special_xlog1py": 2,      # log, ×
    "special_entr": 3,                     # log, ×, negation
    "sinc": 3,                             # × π, sin, ÷
    "logit": 3, "logit_backward": 3,       # 1 - x, ÷, log; 1 - x, ×, ÷
    "sigmoid_backward": 3,                 # g (1 - y) y
    "tanh_backward": 3,                    # g (1 - y·y)
    "silu": 2,                             # sigmoid, ×
    "silu_backward": 6,                    # s = sigmoid x; g s (1 + x (1 - s))
    "elu": 3, "celu": 3, "selu": 3,        # × scale of the exponent, expm1, × scale of the result
    "elu_backward": 4,                     # × scale, exp, × constant, × g
    "softplus": 4,                         # × β, exp, log1p, ÷ β
    "softplus_backward": 5,                # z = exp(β x); g z / (z + 1)
    "mish": 4,                             # exp, log1p, tanh, ×
    "mish_backward": 10,                   # sigmoid s; t = tanh(log1p(exp x)); g (t + x s (1 - t·t))
    "hardsigmoid": 4,                      # + 3, maximum, minimum, ÷ 6
    "hardsigmoid_backward": 1,             # ÷ 6
    "hardswish": 5,                        # hardsigmoid, × x
    "hardswish_backward": 3,               # g (x / 3 + 0.5)
    "log_sigmoid_forward": 6,              # min(x, 0) - log1p(exp(-|x|))
    "log_sigmoid_backward": 8,             # z = exp(-|x|); g (a - b (z / (1 + z)))
    "logaddexp": 7, "logaddexp2": 7,       # max(a, b) + log1p(exp(-|a - b|))
    "addcmul": 3, "addcdiv": 3,            # self + value × a × b
    "isclose": 5,                          # |a - b|, atol + rtol |b|
    "lerp": 3,                             # start + weight (end - start)
    "polar": 2,                            # each part: cos or sin, × r
    "glu": 2,                              # sigmoid of one half, × the other
    "glu_jvp": 6,                          # s; da s + y (db - s db)
    "linalg_cross": 3,                     # two products and their difference
    "_fused_dropout": 2, "native_dropout_backward": 2, "_masked_scale": 2,    # × mask, × scale
    # ÷ scale, +, round, max, min
    "quantize_per_tensor": 5, "quantize_per_tensor_dynamic": 5, "quantize_per_channel": 5,
    "dequantize": 2,                       # - zero point, × scale
    "fake_quantize_per_tensor_affine_cachemask": 7, "fake_quantize_per_channel_affine_cachemask": 7,  # both of these
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": 7,
    "_fake_quantize_learnable_per_tensor_affine": 7, "_fake_quantize_learnable_per_channel_affine": 7,
    "_fused_moving_avg_obs_fq_helper": 9,  # and the running minimum and maximum of the input
    # the forward's rounding again; gradient of x, scale and zero point
    "_fake_quantize_learnable_per_tensor_affine_backward": 12,
    "_fake_quantize_learnable_per_channel_affine_backward": 12,
    "linspace": 2, "arange": 2, "range": 2,  # start + i × step
    "logspace": 3,                         # base ** (start + i × step)
    "fft_fftfreq": 1, "fft_rfftfreq": 1,   # ÷ n d
    "bartlett_window": 3, "hann_window": 4, "hamming_window": 4,   # 1 - |i × c - 1|; a - b cos(i × c)
    "blackman_window": 8,                  # a - b cos(i × c) + d cos(i × 2c)
    "kaiser_window": 7,                    # I₀(β √(1 - (i × c - 1)²)) / I₀(β)
}

# Real operations to one complex operation, where it is not one to each part.
COMPLEX_FLOPS = {
    "mul": 6, "square": 6, "prod": 6, "cumprod": 6,  # ac - bd, ad + bc
    "div": 11,                                # numerator × conjugate (6), c² + d² (3), two quotients
    "reciprocal": 6,                          # c² + d² (3), two quotients, a negation
    "abs": 4,                                 # √(a² + b²)
    "sgn": 6,                                 # abs, two quotients
    "exp": 5,                                 # exp a, cos b, sin b, two products
    "angle": 1, "conj_physical": 1, "_conj_physical": 1}
COMPLEX_PAIRS = {"mul", "div"}  # these counts hold where both operands are complex


def parts(name: str, args: tuple[Any, ...], out: Spec) -> int:
    """Real operations to one of the operator's, by dtype."""
    operands = [a for a in args if isinstance(a, complex) or isinstance(a, Spec) and a.dtype.is_complex]
    if not operands and not out.dtype.is_complex:
        return 1
    if name in COMPLEX_PAIRS and len(operands) < 2:
        return 2
    return COMPLEX_FLOPS.get(name, 2)


def pointwise(name: str, flops: int) -> Formula:
    """The formula of an operator that does ``flops`` elementary operations to an element of its (first) output."""
    def pointwise_flops(*args: Any, out: Any, **_: Any) -> int:
        result = first(out)
        return flops * result.numel * parts(name, args, result)

    return pointwise_flops


GELU_FLOPS = 5
GELU_TANH_FLOPS = 9


for _name, _flops in POINTWISE_FLOPS.items():
    register_each(_name, pointwise(_name, _flops))
# self + alpha * other: 1 FLOP an element, 2 where alpha is not 1
register_each("add sub rsub subtract",
    lambda self, other, alpha=1, *_, out, **__: out.numel * parts("add", (self, other), out) * (1 if alpha == 1 else 2))
# One FLOP an element for each bound
register_each("clamp clip", lambda _self, lower=None, upper=None, *_, out, min=None, max=None, **__: (
    out.numel * sum(bound is not None for bound in (lower, upper, min, max))))
# Exact: 0.5 x (1 + erf(x / √2)). Tanh: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x·x·x)))
register_each("gelu",
    lambda x, *_, approximate="none", **__: x.numel * (GELU_FLOPS if approximate == "none" else GELU_TANH_FLOPS))
# Exact: cdf (4) and density c exp(-x·x / 2) (4), then g (cdf + x density) (3). Tanh: its argument (5), tanh, halves of
# x and 1 + tanh (3), 1 - tanh² (2), derivative of argument (3), joined (4)
register_each("gelu_backward",
    lambda _grad, x, *, approximate="none", **_: x.numel * (11 if approximate == "none" else 18))
# For each of grad's elements: s = sigmoid b; g s; g a s (1 - s)
register_each("glu_backward", lambda grad, *_, **__: 6 * grad.numel)
# Derivative of the two products of glu_backward: each of their factors in turn, 14 products and sums
register_each("glu_backward_jvp", lambda _grad_x, grad, *_, **__: 14 * grad.numel)
# × mask, × 1 / (1 - p); a copy outside training
register_each("native_dropout", lambda x, p, train=None, *_, **__: 0 if train is False else 2 * x.numel)
register_each("mvlgamma", lambda x, p, *_, **__: 3 * p * x.numel)  # Sum over j < p of lgamma(x - j / 2): 3 FLOPs each
register_each("allclose", per_input(5))  # as isclose; its result is a Python bool
for _name in ("max.other", "max.out", "min.other", "min.out"):  # of two tensors; the other overloads reduce one
    register_each(_name, pointwise("maximum", 1))


# Numbers from a generator: what turns its random integers into the distribution.
RANDOM_FLOPS = {
    "rand": 1, "rand_like": 1, "bernoulli": 1,   # × 2⁻²⁴ into [0, 1)
    "uniform": 3, "_philox_uniform": 3,          # and from + u (to - from)
    "randn": 7, "randn_like": 7,                 # u (1), Box–Muller: √(-2 log u), × cos or sin of 2π v
    "normal": 9, "_philox_normal": 9, "normal_functional": 9,  # and × std + mean
    "log_normal": 10, "exponential": 3,          # u, log, ÷ -λ
    "geometric": 4,                              # u, log, ÷ log(1 - p), ceil
    "cauchy": 6,                                 # u, - 0.5, × π, tan, × σ, + median
}
for _name, _flops in RANDOM_FLOPS.items():
    register_each(_name, pointwise(_name, _flops))
del _name, _flops


# Fused optimizer steps, per parameter element; what depends on the step alone (bias corrections) is left out.
#
# Options that are off cost nothing: weight decay 0, momentum 0, amsgrad, a gradient scale (÷ scale), maximize
# (negation).

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


# Fourier transforms: 5 n log₂ n real operations for n complex points, half of it between real and complex ones
# (the count of the radix-2 algorithm, by which FFTW's benchFFT reports speed), rounded to an integer.

def transform_flops(shape: Spec, dims: list[int], per_point: float, scaled: bool) -> int:
    """``per_point`` n log₂ n for each of the batch's transforms over ``dims``, a product for each scaled real number.

    >>> import torch
    >>> transform_flops(Spec.of((3, 8), (8, 1), torch.complex64, "cpu"), [1], 5, False)  # 3 × 5 × 8 × 3
    360
    """
    points = prod(shape[d] for d in dims)
    return round(per_point * shape.numel * log2(points)) + (components(shape) if scaled else 0) if points else 0


register_flop_impl("prims::fft_c2c", lambda x, *_, dim, **__: transform_flops(x, dim, 5, False))
register_flop_impl("prims::fft_r2c", lambda x, *_, dim, **__: transform_flops(x, dim, 2.5, False))
register_flop_impl("prims::fft_c2r", lambda *_, dim, out, **__: transform_flops(out, dim, 2.5, False))
register_each("_fft_c2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 5, normalization != 0))
register_each("_fft_r2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 2.5, normalization != 0))
register_each("_fft_c2r",
    lambda x, dim, normalization, *_, out, **__: transform_flops(out, dim, 2.5, normalization != 0))
