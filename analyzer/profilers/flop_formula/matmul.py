"""FLOPs of matrix products, dense, quantized and sparse, and of linear algebra."""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, Formula, broadcast, multiply_adds, register_each, register_flop_impl

# Matrix products. An m×k by k×n product is m·k·n multiply-adds; an added bias or `beta * self` adds nothing
# (the convention of torch.utils.flop_counter, whose integers these are wherever it has a formula).

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


# Dense linear algebra: the leading terms of LAPACK Working Note 41 (Blackford and Dongarra, appendix C) for
# factorizations and solves, and of Golub and Van Loan, Matrix Computations (4th ed.), for eigenvalues and singular
# values, whose data-dependent iterations are averages. Rounded down; a complex matrix counts four times a real one.

def matrices(a: Spec) -> int:
    """Matrices in the batch, each counted 4 times if complex."""
    return prod(a[:-2]) * (4 if a.dtype.is_complex else 1)


def lu(m: int, n: int) -> int:
    """Working Note 41, GETRF: m n² - n³/3 (m ≥ n); 2/3 n³ for a square."""
    long, short = max(m, n), min(m, n)
    return long * short * short - short ** 3 // 3


def qr(m: int, n: int) -> int:
    """GEQRF: 2 m n² - 2/3 n³ (m ≥ n)."""
    long, short = max(m, n), min(m, n)
    return 2 * long * short * short - 2 * short ** 3 // 3


def form_q(m: int, n: int, k: int) -> int:
    """ORGQR: 4 m n k - 2 (m + n) k² + 4/3 k³."""
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k ** 3 // 3


def svd(m: int, n: int, vectors: bool) -> int:
    """Golub and Van Loan, figure 8.6.1: 4 m n² - 4/3 n³ for the values, 14 m n² + 8 n³ with thin vectors."""
    m, n = max(m, n), min(m, n)
    return 14 * m * n * n + 8 * n ** 3 if vectors else 4 * m * n * n - 4 * n ** 3 // 3


def of_square(per_matrix: Any) -> Formula:
    """The formula of one n×n input: ``per_matrix(n)`` each."""
    return lambda a, *_, **__: matrices(a) * int(per_matrix(a[-1]))


def right_hand_sides(a: Spec, b: Spec) -> int:
    """Columns of b for one matrix of a, whose rows b has too (a vector where b has a dimension less)."""
    return max(1, b.numel // max(1, prod(a[:-1])))


def triangular_flops(a: Spec, b: Spec, *_: Any, out: Spec, **__: Any) -> int:
    """TRSM: n² for each column of the result, one row or column of which has n elements."""
    return out.numel * a[-1] * (4 if a.dtype.is_complex else 1)


def qr_flops(a: Spec, mode: str = "reduced", *_: Any, out: Any = None, **__: Any) -> int:
    """The factorization, and the forming of Q: min(m, n) columns reduced, m complete, none for mode "r"."""
    m, n = a[-2:]
    columns = {"reduced": min(m, n), "complete": m, "r": 0}[mode]
    return matrices(a) * (qr(m, n) + (form_q(m, columns, min(m, n)) if columns else 0))


def ormqr_flops(a: Spec, tau: Spec, other: Spec, left: bool = True, *_: Any, out: Any = None, **__: Any) -> int:
    """ORMQR: 4 n m k - 2 n k² from the left, roles exchanged from the right."""
    m, n = other[-2:] if left else other[-2:][::-1]
    k = tau[-1]
    return matrices(other) * (4 * n * m * k - 2 * n * k * k)


def pinv_flops(a: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """A singular value decomposition and V Σ⁻¹ Uᵀ: k m (the scaling) and 2 m n k, k = min(m, n)."""
    m, n = a[-2:]
    k = min(m, n)
    return matrices(a) * (svd(m, n, True) + k * m + 2 * m * n * k)


def lstsq_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """GELS: QR, then Qᵀb (4 m n - 2 n²) and a triangular solve (n²) for each right-hand side."""
    m, n = max(a[-2:]), min(a[-2:])
    return matrices(a) * (qr(m, n) + right_hand_sides(a, b) * (4 * m * n - 2 * n * n + n * n))


# POTRF, SYTRF: n³/3
register_each("linalg_cholesky_ex cholesky linalg_ldl_factor_ex", of_square(lambda n: n ** 3 // 3))
register_each("linalg_lu linalg_lu_factor_ex", lambda a, *_, **__: matrices(a) * lu(a[-2], a[-1]))
register_each("_linalg_det _linalg_slogdet", of_square(lambda n: lu(n, n) + n))  # and the product of the diagonal
register_each("linalg_inv_ex", of_square(lambda n: 2 * n ** 3))  # GETRF + GETRI: 2/3 n³ + 4/3 n³
register_each("cholesky_inverse", of_square(lambda n: 2 * n ** 3 // 3))  # POTRI
# LU, and two triangular solves of n² a right-hand side each
register_each("_linalg_solve_ex",
    lambda a, b, *_, **__: matrices(a) * (lu(a[-1], a[-1]) + 2 * a[-1] ** 2 * right_hand_sides(a, b)))
register_each("linalg_lu_solve", lambda a, pivots, b, *_, out, **__: 2 * triangular_flops(a, b, out=out))
# SYTRS: 2 n² a right-hand side
register_each("linalg_ldl_solve", lambda a, pivots, b, *_, out, **__: 2 * triangular_flops(a, b, out=out))
register_each("linalg_solve_triangular", triangular_flops)
# triangular_solve and cholesky_solve take the right-hand side first
register_each("triangular_solve", lambda b, a, *_, **__: triangular_flops(a, b, out=b))
# POTRS: two triangular solves
register_each("cholesky_solve _cholesky_solve_helper", lambda b, a, *_, **__: 2 * triangular_flops(a, b, out=b))
register_each("linalg_qr", qr_flops)
register_each("geqrf", lambda a, *_, **__: matrices(a) * qr(a[-2], a[-1]))
register_each("linalg_householder_product", lambda a, tau, *_, **__: matrices(a) * form_q(a[-2], a[-1], tau[-1]))
register_each("ormqr", ormqr_flops)
# Golub and Van Loan 8.3.5 (symmetric QR): 4/3 n³ for the values, 9 n³ with vectors
register_each("_linalg_eigh", lambda a, uplo="L", compute_v=True, *_, **__: (
    matrices(a) * (9 * a[-1] ** 3 if compute_v else 4 * a[-1] ** 3 // 3)))
register_each("linalg_eig", of_square(lambda n: 25 * n ** 3))  # Golub and Van Loan 7.5.6: 25 n³ with vectors,
register_each("linalg_eigvals _linalg_eigvals", of_square(lambda n: 10 * n ** 3))  # 10 n³ without
register_each("_linalg_svd", lambda a, full_matrices=False, compute_uv=True, *_, **__: (
    matrices(a) * svd(a[-2], a[-1], compute_uv)))
register_flop_impl("prims::svd", lambda a, *, out, full_matrices=False: matrices(a) * svd(a[-2], a[-1], True))
register_each("linalg_pinv", pinv_flops)
register_each("linalg_lstsq", lstsq_flops)
# Bader, Blanes and Casas 2019: the Taylor polynomial of degree 18 takes 5 products; squarings are data
register_each("linalg_matrix_exp", of_square(lambda n: 5 * 2 * n ** 3))


# Operators of bitsandbytes. A quantized value is divided by its block's largest magnitude (1; which is the largest
# counts nothing, as all comparisons), a dequantized one is multiplied by it (1).

def product_4bit_flops(x: Spec, weight: Spec, shape: list[int], *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Takes x [..., k] by a packed weight of ``shape`` [n, k], whose elements are multiplied by scales."""
    return multiply_adds(x.numel * shape[0], x) + FlopCount(prod(shape))


# By name: FLOPs per element, those of weight decay, and states (csrc/kernels.cu, kOptimizer32bit1State and 2State).
# Adam's are those of `optimizer.adam`; Lion: β₁ m + (1 - β₁) g (3), p - lr × its sign (2), m (3); RMSprop: v (4),
# p - lr × g ÷ (√v + ε) (5); Adagrad: sum + g g (2) and the same 5; momentum: β m + g (2), p - lr m (2).
_OPTIMIZERS = {"adam": (13, 1, 2), "lion": (8, 1, 1), "rmsprop": (9, 2, 1), "adagrad": (7, 2, 1), "momentum": (4, 2, 1)}


def optimizer_32bit_flops(name: str, gradient: Spec, *rest: Any, **__: Any) -> int | None:
    """One parameter's update, by the optimizer's name; None for one that is not in the table."""
    return _update_flops(name, gradient, weight_decay=rest[11])


def optimizer_8bit_flops(name: str, gradient: Spec, *rest: Any, **__: Any) -> int | None:
    """The same, and each state is dequantized and quantized again (1 each)."""
    found = _update_flops(name, gradient, weight_decay=rest[14])
    return None if found is None else found + 2 * _OPTIMIZERS[name][2] * gradient.numel


def _update_flops(name: str, gradient: Spec, weight_decay: float) -> int | None:
    if name not in _OPTIMIZERS:
        return None
    each, of_decay, _ = _OPTIMIZERS[name]
    return gradient.numel * (each + (of_decay if weight_decay else 0))


for _name in ("gemm_4bit", "gemv_4bit"):
    register_flop_impl(f"bitsandbytes::{_name}", product_4bit_flops)
register_flop_impl("bitsandbytes::int8_linear_matmul", linear_flops)
register_flop_impl("bitsandbytes::int8_mm_dequant",  # × row's scale × column's scale, and the bias
                   lambda a, rows, columns, dtype=None, bias=None, **_: a.numel * (2 + (bias is not None)))
register_flop_impl("bitsandbytes::int8_vectorwise_dequant", lambda a, scales, **_: 2 * a.numel)
for _name in ("int8_vectorwise_quant", "quantize_4bit", "quantize_blockwise"):
    register_flop_impl(f"bitsandbytes::{_name}", lambda a, *_, **__: a.numel)
register_flop_impl("bitsandbytes::dequantize_4bit", lambda a, absmax, blocksize, kind, shape, *_, **__: prod(shape))
register_flop_impl("bitsandbytes::dequantize_blockwise", lambda a, *_, **__: a.numel)
register_flop_impl("bitsandbytes::optimizer_update_8bit_blockwise", optimizer_8bit_flops)
register_flop_impl("bitsandbytes::optimizer_update_32bit", optimizer_32bit_flops)


# Operators of sparse tensors, counted by the elements that are stored (all of a block's, in a layout of blocks).

def stored(spec: Spec) -> int:
    """Elements that a sparse tensor stores.

    >>> import torch
    >>> f32 = lambda *s: Spec.of(s, (1,) * len(s), torch.float32, "cpu")
    >>> stored(Spec.of((4, 9), (), torch.float32, "cpu", (f32(2, 5), f32(5))))
    5
    """
    return spec.parts[-1].numel


def product_flops(a: Spec, b: Spec, *_: Any, out: Any = None, **__: Any) -> FlopCount | None:
    """A multiply-add for each stored element and column of the dense operand (row, where that is the first)."""
    if a.parts and b.parts:
        return None
    sparse, lines = (a, b.numel // b[0] if b[0] else 0) if a.parts else (b, a.numel // a[-1] if a[-1] else 0)
    return multiply_adds(stored(sparse) * lines, sparse)


def sum_flops(self: Spec, other: Spec, *_: Any, alpha: Any = 1, out: Any = None, **__: Any) -> FlopCount | None:
    """Into a dense tensor each stored element is added; the elements of two sparse ones are only put together."""
    if self.parts and other.parts:
        return FlopCount(0)
    return FlopCount((1 if alpha == 1 else 2) * stored(self if self.parts else other))


SPARSE_FORMULAS: dict[str, Formula] = {
    "mm": product_flops, "mv": product_flops, "add": sum_flops,
    **dict.fromkeys(("addmm", "_sparse_addmm", "addmv"), lambda _self, a, b, *_, **__: product_flops(a, b)),
    **dict.fromkeys(("mul", "div"),
                    lambda a, b, *_, **__: FlopCount(stored(a if isinstance(a, Spec) and a.parts else b))),
    "sum": lambda x, *_, **__: FlopCount(max(0, stored(x) - 1)),
}
"""By the name of an operator of ATen, what it counts where it takes or gives a sparse tensor; of others, which have
arithmetic, nothing is known: adding up elements at one place depends on data."""
