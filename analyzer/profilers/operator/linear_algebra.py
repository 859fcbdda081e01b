"""FLOPs of dense linear algebra and of Fourier transforms, whose times are those of their traffic."""
from __future__ import annotations

from math import log2, prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import Formula, components, register_each, register_flop_impl

# FLOPs of dense linear algebra: the leading terms of LAPACK Working Note 41 (Blackford and Dongarra, appendix C) for
# factorizations and solves, and of Golub and Van Loan, Matrix Computations (4th ed.), for eigenvalues and singular
# values, whose data-dependent iterations are averages. Rounded down; a complex matrix counts four times a real one.

def matrices(a: Spec) -> int:
    """Matrices in the batch, each counted 4 times if complex."""
    return prod(a[:-2]) * (4 if a.dtype.is_complex else 1)


def lu(m: int, n: int) -> int:
    """Working Note 41, GETRF: m n² - n³/3 (m ≥ n); 2/3 n³ for a square."""
    long, short = max(m, n), min(m, n)
    return long * short * short - short ** 3 // 3


def qr(m: int, n: int, columns: int = 0) -> int:
    """GEQRF: 2 m n² - 2/3 n³ (m ≥ n), and `form_q` of so many columns."""
    long, short = max(m, n), min(m, n)
    return 2 * long * short * short - 2 * short ** 3 // 3 + (form_q(m, columns, short) if columns else 0)


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


def triangular_flops(a: Spec, *_: Any, out: Spec, **__: Any) -> int:
    """TRSM: n² for each column of the result, one row or column of which has n elements."""
    return out.numel * a[-1] * (4 if a.dtype.is_complex else 1)


# POTRF, SYTRF: n³/3
register_each("linalg_cholesky_ex cholesky linalg_ldl_factor_ex", of_square(lambda n: n ** 3 // 3))
register_each("linalg_lu linalg_lu_factor_ex", lambda a, *_, **__: matrices(a) * lu(a[-2], a[-1]))
register_each("_linalg_det _linalg_slogdet", of_square(lambda n: lu(n, n) + n))  # and the product of the diagonal
register_each("linalg_inv_ex", of_square(lambda n: 2 * n ** 3))  # GETRF + GETRI: 2/3 n³ + 4/3 n³
register_each("cholesky_inverse", of_square(lambda n: 2 * n ** 3 // 3))  # POTRI
# LU, and two triangular solves of n² a right-hand side each
register_each("_linalg_solve_ex",
    lambda a, b, *_, **__: matrices(a) * (lu(a[-1], a[-1]) + 2 * a[-1] ** 2 * right_hand_sides(a, b)))
register_each("linalg_lu_solve", lambda a, pivots, b, *_, out, **__: 2 * triangular_flops(a, out=out))
# SYTRS: 2 n² a right-hand side
register_each("linalg_ldl_solve", lambda a, pivots, b, *_, out, **__: 2 * triangular_flops(a, out=out))
register_each("linalg_solve_triangular", triangular_flops)
# triangular_solve and cholesky_solve take the right-hand side first
register_each("triangular_solve", lambda b, a, *_, **__: triangular_flops(a, out=b))
# POTRS: two triangular solves
register_each("cholesky_solve _cholesky_solve_helper", lambda b, a, *_, **__: 2 * triangular_flops(a, out=b))
# Of Q, min(m, n) columns reduced, m complete, none for mode "r"
register_each("linalg_qr", lambda a, mode="reduced", *_, **__: (
    matrices(a) * qr(a[-2], a[-1], {"reduced": min(a[-2:]), "complete": a[-2], "r": 0}[mode])))
register_each("geqrf", lambda a, *_, **__: matrices(a) * qr(a[-2], a[-1]))
register_each("linalg_householder_product", lambda a, tau, *_, **__: matrices(a) * form_q(a[-2], a[-1], tau[-1]))
# ORMQR: 4 n m k - 2 n k² from the left, roles exchanged from the right
register_each("ormqr", lambda a, tau, other, left=True, *_, **__: (
    matrices(other) * tau[-1] * (4 * other[-2] * other[-1] - 2 * other[-1 if left else -2] * tau[-1])))
# Golub and Van Loan 8.3.5 (symmetric QR): 4/3 n³ for the values, 9 n³ with vectors
register_each("_linalg_eigh", lambda a, uplo="L", compute_v=True, *_, **__: (
    matrices(a) * (9 * a[-1] ** 3 if compute_v else 4 * a[-1] ** 3 // 3)))
register_each("linalg_eig", of_square(lambda n: 25 * n ** 3))  # Golub and Van Loan 7.5.6: 25 n³ with vectors,
register_each("linalg_eigvals _linalg_eigvals", of_square(lambda n: 10 * n ** 3))  # 10 n³ without
register_each("_linalg_svd", lambda a, full_matrices=False, compute_uv=True, *_, **__: (
    matrices(a) * svd(a[-2], a[-1], compute_uv)))
register_flop_impl.add("prims::svd", lambda a, *, out, full_matrices=False: matrices(a) * svd(a[-2], a[-1], True))
# A singular value decomposition and V Σ⁻¹ Uᵀ: k m (the scaling) and 2 m n k, k = min(m, n)
register_each("linalg_pinv", lambda a, *_, **__: (
    matrices(a) * (svd(a[-2], a[-1], True) + min(a[-2:]) * a[-2] * (1 + 2 * a[-1]))))
# GELS: QR, then Qᵀb (4 m n - 2 n²) and a triangular solve (n²) for each right-hand side
register_each("linalg_lstsq", lambda a, b, *_, **__: matrices(a) * (qr(a[-2], a[-1]) + right_hand_sides(a, b) * (
    4 * a[-2] * a[-1] - min(a[-2:]) ** 2)))
# Bader, Blanes and Casas 2019: the Taylor polynomial of degree 18 takes 5 products; squarings are data
register_each("linalg_matrix_exp", of_square(lambda n: 5 * 2 * n ** 3))


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


register_flop_impl.add("prims::fft_c2c", lambda x, *_, dim, **__: transform_flops(x, dim, 5, False))
register_flop_impl.add("prims::fft_r2c", lambda x, *_, dim, **__: transform_flops(x, dim, 2.5, False))
register_flop_impl.add("prims::fft_c2r", lambda *_, dim, out, **__: transform_flops(out, dim, 2.5, False))
register_each("_fft_c2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 5, normalization != 0))
register_each("_fft_r2c", lambda x, dim, normalization, *_, **__: transform_flops(x, dim, 2.5, normalization != 0))
register_each("_fft_c2r",
    lambda x, dim, normalization, *_, out, **__: transform_flops(out, dim, 2.5, normalization != 0))
