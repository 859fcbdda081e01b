"""Operators that work on each element alone, random numbers, fills and copies: FLOPs, and the time of their kernels."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.collective import host_copy_time, peer_copy_time
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, find_constants, join_known
from analyzer.hardware.kernel_time.pointwise import (
    FAMILY,
    cast_time,
    joined_dimensions,
    pointwise_time,
    random_time,
    scattered_bytes,
    stream_time,
)
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec
from analyzer.profilers.traffic import plan_of, touched_bytes

from .registration import Formula, TimeRule, first, per_input, register_each, register_times

# FLOPs of operators that work on each element alone.
#
# The convention: one FLOP for each elementary operation that an output element needs. Elementary are + - × ÷, negation,
# absolute value, sign, rounding to an integer, minimum and maximum (so ReLU), remainder, and each function that libm or
# CUDA's math library gives in one call: exp, log, pow, square root, erf, tanh, lgamma and so on, sigmoid and special
# functions too. Comparing into a boolean and choosing between values (where, masked_fill, the gradient of ReLU) are
# free, constants are folded, and of a piecewise function the longest branch counts. A complex element counts each
# operation once a part, save COMPLEX_FLOPS.

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
    return lambda *args, out, **_: flops * first(out).numel * parts(name, args, first(out))


GELU_FLOPS, GELU_TANH_FLOPS = 5, 9
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


# The time of pointwise kernels, fills and copies.

NAMES = """abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip complex conj_physical
copysign cos cosh deg2rad div divide elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin
fmod frac ge glu glu_backward greater greater_equal gt hardshrink hardsigmoid hardsigmoid_backward hardswish
hardswish_backward hardtanh hardtanh_backward heaviside huber_loss_backward hypot isfinite isinf isnan isneginf
isposinf le leaky_relu leaky_relu_backward lerp less less_equal lgamma log log10 log1p log2 log_sigmoid_backward
logaddexp logical_and logical_not logical_or logical_xor logit logit_backward lt masked_fill_ maximum minimum mish
mish_backward mse_loss_backward mul multiply mvlgamma nan_to_num native_dropout_backward ne neg negative not_equal
polar positive real reciprocal relu relu6 remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign signbit silu
silu_backward sin sinc sinh smooth_l1_loss_backward softplus softplus_backward softshrink sqrt square sub subtract tan
tanh tanh_backward threshold threshold_backward tril triu true_divide trunc where xlogy"""
FILLS = """arange eye fill fill_ full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor
zero zero_ zeros zeros_like"""
RANDOM = """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ native_dropout normal_ rand rand_like
randint randint_like randn randn_like random_ uniform_"""
# Constants of the family that give the instructions of one element, for functions that are bound by them.
COSTLY = {"gelu": "gelu_instructions", "gelu_backward": "gelu_backward_instructions"}
# Exponents for which ``pow`` multiplies or divides (``PowKernel.cu``).
EASY_EXPONENTS = (0, 0.5, 1, 2, 3, -0.5, -1, -2)
# Casts that copy as they load and store (``Copy.cu``: ``float16_copy_kernel_cuda``, ``bfloat16_copy_kernel_cuda``).
DIRECT_CASTS = {(torch.float32, torch.float16), (torch.float32, torch.bfloat16)}

def is_dense(spec: Spec) -> bool:
    """Whether the elements lie side by side in the order of the dimensions."""
    return all(size == 1 or stride == dense for size, stride, dense in zip(spec, spec.stride, dense_strides(spec)))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of that shape whose elements lie side by side.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def broadcast_strides(spec: Spec, shape: Spec) -> tuple[int, ...]:
    """The strides with which ``spec`` is read as if it had ``shape``; 0 along what is repeated."""
    missing = len(shape) - len(spec)
    if missing == 0 and tuple(spec) == tuple(shape):
        return spec.stride
    return (0,) * missing + tuple(0 if size == 1 else stride for size, stride in zip(spec, spec.stride, strict=True))


def is_channels_last(source: Spec) -> bool:
    """Whether the channels of a position lie side by side."""
    return len(source) > 3 and source[1] > 1 and source.stride[1] == 1 and math.prod(source[2:]) > 1


def moved_bytes(signature: Signature) -> int:
    return sum(plan_of(signature).total)


def specs_time(out: Spec, operands: Sequence[Spec], nbytes: float, device: DeviceSpec,
               instructions: float = 0.0, converts: bool = False) -> KernelTime | None:
    """A pointwise kernel that makes ``out`` of ``operands``, whose distinct elements are ``nbytes``."""
    strides = out.stride
    if all(spec.stride == strides and tuple(spec) == tuple(out) for spec in operands) and is_dense(out):
        return pointwise_time(out.numel, nbytes, device, instructions=instructions, operands=len(operands) + 1,
                              converts=converts)
    walks = [strides, *(broadcast_strides(spec, out) for spec in operands if len(spec) <= len(out))]
    dimensions = joined_dimensions(out, walks)
    fastest = min((i for i, size in enumerate(out) if size > 1), key=lambda i: strides[i], default=None)
    if fastest is not None:
        for spec, walk in zip((out, *operands), walks):
            if walk[fastest] > 1:
                nbytes += scattered_bytes(spec.numel, spec.dtype.itemsize, walk[fastest]) - touched_bytes(spec)
    return pointwise_time(out.numel, nbytes, device, instructions=instructions, dimensions=dimensions,
                          operands=len(walks), converts=converts)


def pointwise_rule(signature: Signature, device: DeviceSpec, instructions: str | None = None) -> KernelTime | None:
    """Operators that make each element of one result from those at its place; ``instructions`` names a constant."""
    if not signature.outputs:
        return None
    out = signature.outputs[0]
    operands = [s for s in signature.inputs if len(s) <= len(out) and (len(s) or s.device != "cpu")]
    dtypes = {s.dtype for s in operands if s.dtype is not torch.bool}
    converts = len(dtypes) > 1 or bool(dtypes) and out.dtype is not torch.bool and out.dtype not in dtypes
    each = 0.0 if instructions is None else constant(instructions, device)
    return specs_time(out, operands, moved_bytes(signature), device, each, converts)


def constant(name: str, device: DeviceSpec) -> float:
    return find_constants(FAMILY, device)[name]


def copy_time(out: Spec, source: Spec, device: DeviceSpec, pinned: bool = False) -> KernelTime | None:
    """A copy into another type or order, or between host and device, from or into ``pinned`` memory or not, or from one
    device to another: a device writes into the other's memory, in the type that it has there (``copy_kernel_cuda`` in
    aten/src/ATen/native/cuda/Copy.cu).
    """
    if out.numel == 0:
        return NO_TIME
    if device.kind != "cpu":
        if (out.device == "cpu") != (source.device == "cpu"):
            return host_copy_time(source.nbytes, device, pinned=pinned, to_device=source.device == "cpu")
        if out.device == "cpu":
            return NO_TIME
        if out.device != source.device:
            return peer_copy_time(out.nbytes, device)
    converts = out.dtype != source.dtype and (source.dtype, out.dtype) not in DIRECT_CASTS
    if out.dtype != source.dtype and out.stride == source.stride and is_dense(out):
        return cast_time(out.numel, out.nbytes + source.nbytes, device, converts)
    return specs_time(out, (source,), touched_bytes(out) + touched_bytes(source), device, 0.0, converts)


def with_copies(rule: TimeRule) -> TimeRule:
    """A rule of an operator that copies what does not lie side by side before it starts (``contiguous()``)."""
    def copied(signature: Signature, device: DeviceSpec) -> KernelTime | None:
        time = rule(signature, device)
        scattered = [s for s in signature.inputs if len(s) > 1 and not is_dense(s) and not is_channels_last(s)]
        if time is None or not scattered:
            return time
        copies = [specs_time(Spec.of(tuple(s), dense_strides(s), s.dtype, s.device), (s,),
                             s.nbytes + touched_bytes(s), device) for s in scattered]
        return join_known(*copies, time)

    return copied


def copy_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``copy_`` from its second argument; ``clone``, ``contiguous``, ``_to_copy`` from their first. What does not block
    is assumed to be pinned: from the device PyTorch pins the result (``_to_copy``), to it users do.
    """
    if not signature.inputs or not signature.outputs:
        return None
    into = signature.op._schema.name in ("aten::copy_", "aten::copy")
    blocks_not = signature.args[2] if into and len(signature.args) > 2 else signature.kwargs.get("non_blocking")
    out, sources = signature.outputs[0], signature.inputs[1 if into else 0:]
    # a number is expanded on the host before it is copied: ``copy_kernel_cuda`` of aten/src/ATen/native/cuda/Copy.cu
    source = sources[0] if sources else Spec.of(tuple(out), dense_strides(out), out.dtype, "cpu")
    return copy_time(out, source, device, pinned=bool(blocks_not))


def cat_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One kernel for up to 128 tensors (``Shape.cu``); an address is computed for each element of scattered ones."""
    if not signature.outputs:
        return NO_TIME
    out = signature.outputs[0]
    given = [s for s in signature.inputs if s.numel]
    is_plain = all(is_dense(s) and s.dtype == out.dtype for s in given)
    instructions = 0.0 if is_plain else out.numel * constant("cat_instructions", device)
    return stream_time(moved_bytes(signature), device, instructions, kernels=-(-len(given) // 128) or 1)


def padded_rule(signature: Signature, device: DeviceSpec, is_slice: bool) -> KernelTime | None:
    """A result of zeros, or of a constant, into which the input is copied."""
    if not signature.outputs:
        return None
    source, fill = signature.inputs[0], stream_time(signature.outputs[0].nbytes, device)
    return join_known(fill, specs_time(source, (source,), 2 * source.nbytes, device) if is_slice else
                      stream_time(2 * source.nbytes, device))


def unmeasured(rule: TimeRule) -> TimeRule:
    """A rule of operators of which nothing was measured: no more certain than the least certain kind that was."""
    def widened(signature: Signature, device: DeviceSpec) -> KernelTime | None:
        time = rule(signature, device)
        if time is None or not time.kernels:
            return time
        return replace(time, spread=max(time.spread, constant("latency_spread", device)))

    return widened


register_times(NAMES, pointwise_rule)
register_times(FILLS, lambda signature, device: NO_TIME if not (outputs := signature.outputs) else specs_time(
    outputs[0], (), touched_bytes(outputs[0]), device))
for _name, _instructions in COSTLY.items():
    register_times(_name, partial(pointwise_rule, instructions=_instructions))
register_times(RANDOM, lambda signature, device: NO_TIME if not signature.outputs else random_time(
    signature.outputs[0].numel, moved_bytes(signature), device))
# small exponents are multiplied out; others take a logarithm
register_times("pow", lambda signature, device: pointwise_rule(signature, device, (
    None if signature.args[-1] in EASY_EXPONENTS else "pow_instructions")))
register_times("copy_ copy clone contiguous _to_copy to _copy_from _reshape_copy", copy_rule)
# another look at the same memory, which their schemas do not say
register_times("_unsafe_view _lazy_clone lift_fresh lift", lambda signature, device: NO_TIME)
# a copy, which is then filled
register_times("masked_fill", lambda signature, device: join_known(
    copy_time(signature.outputs[0], signature.inputs[0], device), pointwise_rule(signature, device)))
register_times("cat stack hstack vstack", cat_rule)
register_times("slice_backward select_backward", partial(padded_rule, is_slice=True))
register_times("constant_pad_nd", unmeasured(partial(padded_rule, is_slice=False)))
