"""Matrix products. An m×k by k×n product is m·k·n multiply-adds; an added bias or `beta * self` adds nothing
(the convention of torch.utils.flop_counter, whose integers these are wherever it has a formula).
"""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, register_each, register_flop_impl
from .size import broadcast, multiply_adds


def matmul_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """``a @ b`` with broadcast batches: [..., m, k] by [..., k, n], vectors as torch.matmul takes them.

    >>> import torch
    >>> f32 = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> pairs = (f32(2, 3), f32(3, 4)), (f32(5), f32(5)), (f32(7, 1, 2, 3), f32(6, 3, 4))
    >>> tuple(matmul_flops(*pair).macs for pair in pairs)
    (24, 5, 1008)
    """
    k = a[-1] if a else 1
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    return multiply_adds(prod(broadcast(a[:-2], b[:-2])) * rows * k * columns, a)


def linear_flops(x: Spec, weight: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Takes x [..., in] by weight [out, in] (or [in])."""
    return multiply_adds(x.numel * prod(weight[:-1]), x)


def grouped_mm_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Products over groups that split one dimension (rows, columns or k), or one per group (3-D by 3-D).

    Groups that split a dimension add up to the whole, so only the 3-D by 3-D case multiplies by groups; offsets are
    data: rows past the last one count.
    """
    groups = a[0] if len(a) == 3 and len(b) == 3 else 1
    return multiply_adds(groups * a[-2] * a[-1] * b[-1], a)


def weight_packed_flops(x: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """A product with a packed weight, whose sizes are those of x [..., k] and out [..., n]."""
    return multiply_adds(out.numel * x[-1], x)


def semi_structured_flops(_a: Spec, _meta: Spec, b: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """2:4 sparse a times dense b [k, n]."""
    return half_executed(multiply_adds(out.numel * b[-2], b))


def half_executed(dense: FlopCount) -> FlopCount:
    """2:4 sparse products, counted dense; half of them meet a stored weight."""
    return FlopCount(dense.flops, dense.macs, executed_flops=dense.flops // 2)


def trilinear_flops(i1: Spec, i2: Spec, i3: Spec, expand1: list[int], expand2: list[int], expand3: list[int],
                    sumdim: list[int], unroll_dim: int = 1, *, out: Any = None, **_: Any) -> FlopCount:
    """Bilinear and its gradients: for each index of ``unroll_dim``, i1·i2 summed over what i3 lacks, then times i3.

    torch.nn.functional.bilinear of [b, m] and [b, n] to o features: b·o·m·n + b·o·n multiply-adds
    (the order of products is that of `_trilinear` in ATen's Linear.cpp).
    """
    dims = len(i1) + len(expand1)
    sizes = [1] * dims
    for spec, expand in ((i1, expand1), (i2, expand2), (i3, expand3)):
        own = iter(spec)
        for dim in range(dims):
            if dim not in expand:
                sizes[dim] = next(own)
    first_pair = prod(s for d, s in enumerate(sizes) if d == unroll_dim or not (d in expand1 and d in expand2))
    summed_early = [d for d in sumdim if d in expand3 and d != unroll_dim]
    second_pair = prod(s for d, s in enumerate(sizes) if d not in summed_early)
    return multiply_adds(first_pair + second_pair, i1)


register_each("mm bmm mv dot vdot matmul linalg_matmul _scaled_mm _scaled_mm_v2 _int_mm _mixed_dtypes_linear",
              matmul_flops)
# ``self + a @ b``: addmm, addmv, baddbmm, addbmm (whose batch is summed over, so each product still counts)
register_each("addmm baddbmm addbmm addmv", lambda _self, a, b, *_, **__: matmul_flops(a, b))
# An addmm with its activation fused: 1 FLOP an element for ReLU, 9 for GELU (tanh form): see pointwise.py
register_each("_addmm_activation", lambda self, a, b, *_, out, use_gelu=False, **__: (
    matmul_flops(a, b) + FlopCount((9 if use_gelu else 1) * out.numel)))
# addr: a rank-1 update is an m×1 by 1×n product
register_each("addr", lambda _self, a, b, *_, **__: multiply_adds(a.numel * b.numel, a))
register_each("linear mkldnn_linear inner", linear_flops)
# Input and weight gradient are each a product of the forward's size; a bias gradient adds nothing
register_each("linear_backward mkldnn_linear_backward", lambda x, _grad, weight, output_mask, *_, **__: (
    multiply_adds(x.numel * prod(weight[:-1]) * (bool(output_mask[0]) + bool(output_mask[1])), x)))
register_each("mkldnn_linear_backward_input",
    lambda _size, grad, weight, *_, **__: multiply_adds(grad.numel * weight[-1], grad))
register_each("mkldnn_linear_backward_weights", lambda grad, x, weight, *_, **__: linear_flops(x, weight))
register_each("matmul_backward",
    lambda _grad, a, b, mask, *_, **__: sum([matmul_flops(a, b) for wanted in mask[:2] if wanted], FlopCount(0)))
register_each("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", grouped_mm_flops)
register_each(
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros "
    "_dyn_quant_matmul_4bit", weight_packed_flops)
for _name in ("linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16"):
    register_flop_impl(f"quantized::{_name}", weight_packed_flops)  # an object of C++
register_each("_sparse_semi_structured_mm", semi_structured_flops)
register_each("_sparse_semi_structured_addmm",
    lambda _self, a, meta, b, *_, out, **__: semi_structured_flops(a, meta, b, out=out))
register_each("_sparse_semi_structured_linear",
    lambda x, *_, out, **__: half_executed(multiply_adds(out.numel * x[-1], x)))
register_each("_cslt_sparse_mm",
    lambda _compressed, b, *_, out, **__: semi_structured_flops(_compressed, _compressed, b, out=out))
register_each("_trilinear", trilinear_flops)
# weight [features, m, n]
register_each("bilinear",
    lambda a, b, weight, *_, **__: multiply_adds(prod(a[:-1]) * weight[0] * (weight[1] + 1) * weight[2], a))
# out[i] = sum over j of coefficients[i, j] * x[j]
register_each("_compute_linear_combination",
    lambda x, coefficients, *_, **__: multiply_adds(x.numel * coefficients[0], x))
