"""The time of pointwise operators, fills and copies on the device."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.collective import host_copy_time
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
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.traffic import plan_of, touched_bytes

from .call import TimeRule, broadcast_strides, dense_strides, is_channels_last, is_dense, register_time_impl

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
tanh tanh_backward threshold threshold_backward tril triu true_divide trunc where xlogy""".split()
FILLS = """arange eye fill fill_ full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor
zero zero_ zeros zeros_like""".split()
RANDOM = """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ native_dropout normal_ rand rand_like
randint randint_like randn randn_like random_ uniform_""".split()
#: Constants of the family that give the instructions of one element, for functions that are bound by them.
COSTLY = {"gelu": "gelu_instructions", "gelu_backward": "gelu_backward_instructions"}
#: Exponents for which ``pow`` multiplies or divides (``PowKernel.cu``).
EASY_EXPONENTS = (0, 0.5, 1, 2, 3, -0.5, -1, -2)
#: Casts that copy as they load and store (``Copy.cu``: ``float16_copy_kernel_cuda``, ``bfloat16_copy_kernel_cuda``).
DIRECT_CASTS = {(torch.float32, torch.float16), (torch.float32, torch.bfloat16)}


def specs_time(out: TensorSpec, operands: Sequence[TensorSpec], nbytes: float, device: DeviceSpec,
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
    operands = [s for s in signature.inputs if len(s) <= len(out) and (s or s.device != "cpu")]
    dtypes = {s.dtype for s in operands if s.dtype is not torch.bool}
    converts = len(dtypes) > 1 or bool(dtypes) and out.dtype is not torch.bool and out.dtype not in dtypes
    total = plan_of(signature).total
    each = 0.0 if instructions is None else constant(instructions, device)
    return specs_time(out, operands, total.read_bytes + total.written_bytes, device, each, converts)


def constant(name: str, device: DeviceSpec) -> float:
    """A constant of the family."""
    return find_constants(FAMILY, device)[name]


def pow_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Small exponents are multiplied out; others take a logarithm."""
    exponent = signature.args[1] if len(signature.args) > 1 else None
    is_easy = isinstance(exponent, (int, float)) and exponent in EASY_EXPONENTS
    return pointwise_rule(signature, device, None if is_easy else "pow_instructions")


def random_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Writes random numbers, or drops elements by them."""
    if not signature.outputs:
        return NO_TIME
    total = plan_of(signature).total
    return random_time(signature.outputs[0].numel, total.read_bytes + total.written_bytes, device)


def fill_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Writes its result only."""
    if not signature.outputs:
        return NO_TIME
    out = signature.outputs[0]
    return specs_time(out, (), touched_bytes(out), device)


def copy_time(out: TensorSpec, source: TensorSpec, device: DeviceSpec, pinned: bool = False) -> KernelTime | None:
    """A copy into another type or order, or between host and device, from or into ``pinned`` memory or not."""
    if out.numel == 0:
        return NO_TIME
    if device.kind != "cpu":
        if (out.device == "cpu") != (source.device == "cpu"):
            return host_copy_time(source.nbytes, device, pinned=pinned, to_device=source.device == "cpu")
        if out.device == "cpu":
            return NO_TIME
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
        copies = [specs_time(TensorSpec.of(tuple(s), dense_strides(s), s.dtype, s.device), (s,),
                             s.nbytes + touched_bytes(s), device) for s in scattered]
        return join_known(*copies, time)

    return copied


def copy_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``copy_`` from its second argument; ``clone``, ``contiguous``, ``_to_copy`` from their first.

    What does not block is taken to be pinned: from the device PyTorch pins the result (``_to_copy``), to it users do.
    """
    if not signature.inputs or not signature.outputs:
        return None
    into = signature.op._schema.name in ("aten::copy_", "aten::copy")
    blocks_not = signature.args[2] if into and len(signature.args) > 2 else signature.kwargs.get("non_blocking")
    return copy_time(signature.outputs[0], signature.inputs[1 if into else 0], device, pinned=bool(blocks_not))


def view_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Another look at the same memory, which the operator's schema does not say."""
    return NO_TIME


def masked_fill_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A copy, which is then filled."""
    copy = copy_time(signature.outputs[0], signature.inputs[0], device)
    fill = pointwise_rule(signature, device)
    return join_known(copy, fill)


def cat_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One kernel for up to 128 tensors (``Shape.cu``); an address is computed for each element of scattered ones."""
    if not signature.outputs:
        return NO_TIME
    out = signature.outputs[0]
    given = [s for s in signature.inputs if s.numel]
    is_plain = all(is_dense(s) and s.dtype == out.dtype for s in given)
    instructions = 0.0 if is_plain else out.numel * constant("cat_instructions", device)
    total = plan_of(signature).total
    return stream_time(total.read_bytes + total.written_bytes, device, instructions, kernels=-(-len(given) // 128) or 1)


def slice_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A result of zeros, into which the gradient is copied."""
    if not signature.outputs:
        return None
    out, gradient = signature.outputs[0], signature.inputs[0]
    fill, copy = stream_time(out.nbytes, device), specs_time(gradient, (gradient, ), 2 * gradient.nbytes, device)
    return join_known(fill, copy)


def pad_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A result filled with the constant, into which the input is copied."""
    if not signature.outputs:
        return None
    out, given = signature.outputs[0], signature.inputs[0]
    fill, copy = stream_time(out.nbytes, device), stream_time(2 * given.nbytes, device)
    return join_known(fill, copy)


def unmeasured(rule: TimeRule) -> TimeRule:
    """A rule of operators of which nothing was measured: no more certain than the least certain kind that was."""
    def widened(signature: Signature, device: DeviceSpec) -> KernelTime | None:
        time = rule(signature, device)
        if time is None or not time.kernels:
            return time
        return replace(time, spread=max(time.spread, constant("latency_spread", device)))

    return widened


def register_all(names: Sequence[str], rule: TimeRule, *, copies: bool = False, measured: bool = True) -> None:
    """Register a rule for operators of ATen; ``copies``: see `with_copies`; not ``measured``: see `unmeasured`."""
    rule = with_copies(rule) if copies else rule
    rule = rule if measured else unmeasured(rule)
    for name in names:
        register_time_impl(f"aten::{name}", rule)


register_all(NAMES, pointwise_rule)
register_all(FILLS, fill_rule)
for _name, _instructions in COSTLY.items():
    register_time_impl(f"aten::{_name}", partial(pointwise_rule, instructions=_instructions))
register_all(RANDOM, random_rule)
register_time_impl("aten::pow", pow_rule)
register_all(["copy_", "copy", "clone", "contiguous", "_to_copy", "to", "_copy_from", "_reshape_copy"], copy_rule)
register_all(["_unsafe_view", "_lazy_clone", "lift_fresh", "lift"], view_rule)
register_time_impl("aten::masked_fill", masked_fill_rule)
register_all(["cat", "stack", "hstack", "vstack"], cat_rule)
register_all(["slice_backward", "select_backward"], slice_backward_rule)
register_all(["constant_pad_nd"], pad_rule, measured=False)
