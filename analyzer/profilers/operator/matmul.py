"""Matrix products, dense, quantized and sparse: FLOPs, and which sizes, format and layout each operator multiplies."""
from __future__ import annotations

import math
from math import prod
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, join, join_known
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.hardware.kernel_time.pointwise import stream_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .registration import (
    SPARSE_FORMULAS,
    FlopCount,
    broadcast,
    multiply_adds,
    register_each,
    register_flop_impl,
    register_time_impl,
    register_times,
    uses_tf32,
)

# FLOPs of matrix products. An m×k by k×n product is m·k·n multiply-adds; an added bias or `beta * self` adds nothing
# (the convention of torch.utils.flop_counter, whose integers these are wherever it has a formula).

def matmul_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """``a @ b`` with broadcast batches: [..., m, k] by [..., k, n], vectors as torch.matmul takes them.

    >>> f32 = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> pairs = (f32(2, 3), f32(3, 4)), (f32(5), f32(5)), (f32(7, 1, 2, 3), f32(6, 3, 4))
    >>> tuple(matmul_flops(*pair).macs for pair in pairs)
    (24, 5, 1008)
    """
    k, rows, columns = a[-1] if len(a) else 1, a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1
    return multiply_adds(prod(broadcast(a[:-2], b[:-2])) * rows * k * columns, a)


def linear_flops(x: Spec, weight: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Takes x [..., in] by weight [out, in] (or [in])."""
    return multiply_adds(x.numel * prod(weight[:-1]), x)


def weight_packed_flops(x: Spec, *_: Any, out: Spec, **__: Any) -> FlopCount:
    """A product with a packed weight, whose sizes are those of x [..., k] and out [..., n]."""
    return multiply_adds(out.numel * x[-1], x)


def half_executed(k: int, out: Spec) -> FlopCount:
    """2:4 sparse products with a dense operand, counted dense; half of them meet a stored weight."""
    dense = multiply_adds(out.numel * k, out)
    return FlopCount(dense.flops, dense.macs, executed_flops=dense.flops // 2)


def trilinear_flops(i1: Spec, i2: Spec, i3: Spec, expand1: list[int], expand2: list[int], expand3: list[int],
                    sumdim: list[int], unroll_dim: int = 1, *, out: Any = None, **_: Any) -> FlopCount:
    """Bilinear and its gradients: for each index of ``unroll_dim``, i1·i2 summed over what i3 lacks, then times i3.
    torch.nn.functional.bilinear of [b, m] and [b, n] to o features: b·o·m·n + b·o·n multiply-adds (the order of
    products is that of `_trilinear` in ATen's Linear.cpp).
    """
    sizes = [1] * (len(i1) + len(expand1))
    for spec, expand in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for dim, size in zip((d for d in range(len(sizes)) if d not in expand), spec):
            sizes[dim] = size
    first_pair = prod(s for d, s in enumerate(sizes) if d == unroll_dim or not (d in expand1 and d in expand2))
    second_pair = prod(s for d, s in enumerate(sizes) if d == unroll_dim or not (d in sumdim and d in expand3))
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
# Groups that split a dimension (rows, columns or k) add up to the whole, so only one product a group, 3-D by 3-D,
# multiplies; offsets are data: rows past the last one count
register_each("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", lambda a, b, *_, **__: (
    multiply_adds((a[0] if len(a) == len(b) == 3 else 1) * a[-2] * a[-1] * b[-1], a)))
register_each(
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros "
    "_dyn_quant_matmul_4bit", weight_packed_flops)
for _name in ("linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16"):
    register_flop_impl.add(f"quantized::{_name}", weight_packed_flops)  # an object of C++
register_each("_sparse_semi_structured_mm", lambda _a, _meta, b, *_, out, **__: half_executed(b[-2], out))
register_each("_sparse_semi_structured_addmm", lambda _self, _a, _meta, b, *_, out, **__: half_executed(b[-2], out))
register_each("_sparse_semi_structured_linear", lambda x, *_, out, **__: half_executed(x[-1], out))
register_each("_cslt_sparse_mm", lambda _compressed, b, *_, out, **__: half_executed(b[-2], out))
register_each("_trilinear", trilinear_flops)
# weight [features, m, n]
register_each("bilinear",
    lambda a, b, weight, *_, **__: multiply_adds(prod(a[:-1]) * weight[0] * (weight[1] + 1) * weight[2], a))
# out[i] = sum over j of coefficients[i, j] * x[j]
register_each("_compute_linear_combination",
    lambda x, coefficients, *_, **__: multiply_adds(x.numel * coefficients[0], x))

# Operators of bitsandbytes. A quantized value is divided by its block's largest magnitude (1; which is the largest
# counts nothing, as all comparisons), a dequantized one is multiplied by it (1).
for _name in ("gemm_4bit", "gemv_4bit"):  # x [..., k] by a packed weight of a shape [n, k], its elements times scales
    register_flop_impl.add(f"bitsandbytes::{_name}", lambda x, weight, shape, *_, **__: (
        multiply_adds(x.numel * shape[0], x) + FlopCount(prod(shape))))
register_flop_impl.add("bitsandbytes::int8_linear_matmul", linear_flops)
register_flop_impl.add("bitsandbytes::int8_mm_dequant",  # × row's scale × column's scale, and the bias
                   lambda a, rows, columns, dtype=None, bias=None, **_: a.numel * (2 + (bias is not None)))
register_flop_impl.add("bitsandbytes::int8_vectorwise_dequant", lambda a, scales, **_: 2 * a.numel)
for _name in ("int8_vectorwise_quant", "quantize_4bit", "quantize_blockwise", "dequantize_blockwise"):
    register_flop_impl.add(f"bitsandbytes::{_name}", lambda a, *_, **__: a.numel)
register_flop_impl.add("bitsandbytes::dequantize_4bit", lambda a, absmax, blocksize, kind, shape, *_, **__: prod(shape))


# Operators of sparse tensors, counted by the elements that are stored (all of a block's, in a layout of blocks).

def product_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount | None:
    """A multiply-add for each stored element and column of the dense operand (row, where that is the first)."""
    if a.parts and b.parts:
        return None
    sparse, lines = (a, b.numel // b[0] if b[0] else 0) if a.parts else (b, a.numel // a[-1] if a[-1] else 0)
    return multiply_adds(sparse.parts[-1].numel * lines, sparse)


def of_stored(self: Any, other: Any, *_: Any, alpha: Any = 1, out: Any = None, **__: Any) -> FlopCount:
    """One for each element that the sparse operand stores, two where it is scaled."""
    sparse = self if isinstance(self, Spec) and self.parts else other
    return FlopCount((1 if alpha == 1 else 2) * sparse.parts[-1].numel)


SPARSE_FORMULAS.update({
    "mm": product_flops, "mv": product_flops, "mul": of_stored, "div": of_stored,
    # the elements of two sparse ones are only put together
    "add": lambda self, other, *_, **options: FlopCount(0) if self.parts and other.parts else of_stored(
        self, other, **options),
    **dict.fromkeys(("addmm", "_sparse_addmm", "addmv"), lambda _self, a, b, *_, **__: product_flops(a, b)),
    "sum": lambda x, *_, **__: FlopCount(max(0, x.parts[-1].numel - 1))})


# The time of matrix products: which sizes, format and layout each operator multiplies, and what runs beside it.

UNMEASURED = 0.5  # assumed: the least spread of what no measured row tells of
_REAL = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


def name_of_dtype(spec: Spec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def row_elements(spec: Spec) -> int:
    """Elements from one row of a matrix to the next in memory, in the direction in which they lie together."""
    if len(spec) < 2:
        return 0
    rows, columns = spec[-2:]
    row_stride, column_stride = spec.stride[-2:]
    if column_stride == 1 and (rows > 1 or row_stride >= columns):
        return row_stride if rows > 1 else 0
    return column_stride if columns > 1 else 0


def product_time(batch: int, m: int, n: int, k: int, dtype: str, device: DeviceSpec, rows: int | None = None,
                 use_tf32: bool | None = None, has_weights: bool = True) -> KernelTime | None:
    """Complex products are real ones of twice the n and k. Operands' rows are whole numbers of ``rows``, 0: of any."""
    if dtype in _REAL:
        dtype, n, k = _REAL[dtype], 2 * n, 2 * k
    tf32 = dtype == "float32" and (uses_tf32("matmul") if use_tf32 is None else use_tf32)
    return matmul_time(batch, m, n, k, dtype, device, allow_tf32=tf32, row_elements=rows or 16, has_weights=has_weights)


def _matrices(a: Spec, b: Spec, out: Spec, device: DeviceSpec) -> KernelTime | None:
    """``a @ b`` of matrices, or of batches of them, of which neither is assumed to be a parameter."""
    rows = math.gcd(row_elements(a), row_elements(b), out[-1])
    if a.dtype is torch.float32 and not (a.stride[-1] == b.stride[-2] == 1 or uses_tf32("matmul")):
        rows = 0  # the CUDA cores' kernels load whole rows well, whatever their length, but where both run along k
    return product_time(prod(a[:-2]), a[-2], b[-1], a[-1], name_of_dtype(a), device, rows, has_weights=len(b) == 2)


def _addmm(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``beta * self + a @ b``: a bias vector is added by cuBLASLt in the same kernel, a matrix is copied to the output
    first, unless the output is ``self`` (``addmm_out_cuda_impl`` and ``baddbmm_out_cuda_impl`` in ATen's Blas.cpp).
    """
    added, a, b = signature.inputs[:3]
    out = signature.outputs[0] if signature.outputs else added
    time = _matrices(a, b, out, device)
    is_in_place = signature.op._schema.name.endswith("_")
    if is_in_place or signature.kwargs.get("beta", 1) == 0 or len(a) == 2 and len(added) == 1:
        return time
    return join_known(time, stream_time(out.nbytes + added.nbytes, device))


def _addbmm(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One product after another, each added to the output."""
    _, a, b = signature.inputs[:3]
    rows = math.gcd(row_elements(a), row_elements(b), b[-1])
    one = product_time(1, a[-2], b[-1], a[-1], name_of_dtype(a), device, rows)
    return None if one is None else join([one] * a[0])


def _linear(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """All rows of x [..., k] by weight [n, k]."""
    x, weight = signature.inputs[:2]
    n = weight[0] if len(weight) == 2 else 1
    return product_time(1, prod(x[:-1]), n, x[-1], name_of_dtype(x), device, math.gcd(x[-1], n))


def _matmul(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``torch.matmul``, which folds the batch of a into its rows where b has none."""
    a, b = signature.inputs[:2]
    m, n, k = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1), a[-1] if len(a) else 1
    rows, is_folded = math.gcd(row_elements(a), row_elements(b), n), len(b) <= 2
    batch, m = (1, prod(a[:-1])) if is_folded else (max(signature.outputs[0].numel // max(m * n, 1), 1), m)
    return product_time(batch, m, n, k, name_of_dtype(a), device, rows, has_weights=is_folded)


def _linear_backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    x, grad, weight = signature.inputs[:3]
    mask = signature.named_arguments()["output_mask"]
    m, n, k = prod(x[:-1]), weight[0], weight[-1]
    rows, dtype = math.gcd(n, k), name_of_dtype(x)
    parts = [product_time(1, m, k, n, dtype, device, rows)] if mask[0] else []
    if mask[1]:
        parts.append(product_time(1, n, k, m, dtype, device, rows))
    if mask[2]:
        parts.append(stream_time(grad.nbytes, device))
    return join_known(*parts)


def _grouped(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Groups share what they split evenly, which is what is known of them without their offsets; one kernel for all."""
    a, b = signature.inputs[:2]
    m, n, k = a[-2], b[-1], a[-1]
    if len(a) == 3 and len(b) == 3:
        return product_time(a[0], m, n, k, name_of_dtype(a), device, math.gcd(k, n))
    offsets = next((spec for spec in signature.inputs[2:] if len(spec) == 1 and not spec.dtype.is_floating_point), None)
    groups = offsets[0] if offsets is not None and offsets[0] else 1
    if len(a) == 2 and len(b) == 3:
        m = -(-m // groups)
    elif len(a) == 3:
        n = -(-n // groups)
    else:
        k = -(-k // groups)
    return product_time(groups, m, n, k, name_of_dtype(a), device)


def _narrow_weight(signature: Signature, device: DeviceSpec, n: int | None = None) -> KernelTime | None:
    """A product with a weight of fewer bits than x: as one of x's format, less what memory does not have to bring."""
    x, weight = signature.inputs[:2]
    m, n, k, itemsize = prod(x[:-1]), n or signature.outputs[0][-1], x[-1], x.dtype.itemsize
    product = product_time(1, m, n, k, name_of_dtype(x), device)
    others = x.nbytes + m * n * itemsize
    read, whole = stream_time(others + weight.nbytes, device), stream_time(others + n * k * itemsize, device)
    if product is None or read is None or whole is None or product.bound == "arithmetic":
        return product
    seconds = max(product.seconds - whole.seconds + read.seconds, read.seconds)
    return KernelTime(seconds, max(product.spread, UNMEASURED), "memory", product.kernels)


def _product_4bit(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """bitsandbytes: a vector meets the packed weight in one kernel; for more rows it is unpacked first."""
    x, weight = signature.inputs[:2]
    n, k = signature.args[2]
    if prod(x[:-1]) == 1:
        return _narrow_weight(signature, device, n)
    return join_known(stream_time(weight.nbytes + n * k * x.dtype.itemsize, device),
                      product_time(1, prod(x[:-1]), n, k, name_of_dtype(x), device))


register_times("mm bmm _scaled_mm _scaled_mm_v2 _int_mm", lambda signature, device: _matrices(
    signature.inputs[0], signature.inputs[1], signature.outputs[0], device))
register_times("addmm baddbmm _addmm_activation", _addmm)
register_times("addbmm", _addbmm)
register_times("linear inner", _linear)
register_times("matmul linalg_matmul", _matmul)
# products with a vector read their operands once
register_times("mv addmv addr dot vdot", lambda signature, device: stream_time(
    sum(spec.nbytes for spec in (*signature.inputs, *signature.outputs)), device,
    kernels=2 if "dot" in signature.op._schema.name else 1))
register_times("linear_backward", _linear_backward)
register_times("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", _grouped)
register_times("_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_with_scales_and_zeros _mixed_dtypes_linear",
               _narrow_weight)
for _name in ("gemm_4bit", "gemv_4bit"):
    register_time_impl.add(f"bitsandbytes::{_name}", _product_4bit)
register_time_impl.add("bitsandbytes::int8_linear_matmul", _linear)
