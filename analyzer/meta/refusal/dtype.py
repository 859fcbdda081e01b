"""For which dtypes an operator has no kernel on the CPU and on CUDA, where that on meta takes them."""
from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .rule import name_dtype

Tensor = torch.Tensor

# One letter for each dtype.
_LETTERS = {torch.bool: "b", torch.uint8: "u", torch.int8: "c", torch.int16: "s", torch.int32: "i", torch.int64: "l",
            torch.float16: "h", torch.bfloat16: "g", torch.float32: "f", torch.float64: "d", torch.complex64: "F",
            torch.complex128: "D"}

# Dtypes that the CPU refuses and those that CUDA refuses, then operators. Sources: AT_DISPATCH and TORCH_CHECK of the
# CPU's kernels, as real calls tell them; for CUDA ``dtypesIfCUDA`` in torch/testing/_internal/
# common_methods_invocations.py. `python -m benchmarks.fuzz.run refused-dtypes` prints it anew (torch 2.13).
_TABLE = {
    ("FD", ""):
        "nansum",
    ("FD", "FD"):
        "_batch_norm_with_update amax amin aminmax atan2 bernoulli_ binary_cross_entropy_with_logits clamp clamp_ "
        "clamp_max clamp_min clamp_min_ copysign digamma elu erf erfc erfinv fmax fmin ge gt hardtanh heaviside "
        "cummax cummin hash_tensor i0 le leaky_relu lgamma logit lt max maximum min minimum mode native_group_norm "
        "polygamma randint_like sign signbit softshrink sort special_entr special_i0e special_i1 special_i1e "
        "special_xlog1py xlogy",
    ("b", ""):
        "_trilinear abs abs_ reflection_pad1d trace",
    ("b", "b"):
        "addbmm addcdiv addcmul addmm addmv baddbmm bmm dot linalg_cross mm mv rsub soft_margin_loss "
        "pow sub_ vdot",
    ("bFD", "bFD"):
        "argmax argmin bucketize ceil ceil_ floor fmod kthvalue max_pool2d_with_indices "
        "max_pool3d_with_indices median mvlgamma nanmedian relu remainder round searchsorted threshold topk trunc",
    ("bcsiFD", "bcsiFD"):
        "avg_pool2d",
    ("bcsihgFD", "bcsiFD"):
        "avg_pool3d",
    ("bcsilFD", "bcsilFD"):
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d "
        "upsample_bilinear2d upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    ("bcsilhgFD", "bcsilFD"):
        "_upsample_bilinear2d_aa",
    ("bhgfdFD", "bhgfdFD"):
        "bitwise_left_shift bitwise_right_shift gcd",
    ("bucsil", "bucsil"):
        "lerp lerp_ logcumsumexp silu std uniform_ var",
    ("bucsilFD", ""):
        "_safe_softmax _softmax_backward_data",
    ("bucsilFD", "bFD"):
        "histc",
    ("bucsilFD", "bcsilFD"):
        "upsample_linear1d upsample_trilinear3d",
    ("bucsilFD", "bucsilFD"):
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _prelu_kernel adaptive_max_pool2d adaptive_max_pool3d "
        "binary_cross_entropy celu fractional_max_pool2d fractional_max_pool3d gelu glu grid_sampler_2d "
        "grid_sampler_3d hardshrink hardsigmoid hardswish hypot igamma igammac log_sigmoid_forward "
        "max_pool2d_with_indices_backward max_unpool2d max_unpool3d mish mse_loss nextafter "
        "segment_reduce smooth_l1_loss",
    ("bucsilhg", "bucsilhg"):
        "_cholesky_solve_helper _linalg_eigh cholesky cholesky_inverse cholesky_solve linalg_householder_product "
        "linalg_lu linalg_lu_factor_ex linalg_solve_triangular "
        "ormqr triangular_solve",
    ("bucsilhFD", "bucsilFD"):
        "rrelu_with_noise",
    ("bucsilhgFD", "bucsilFD"):
        "multi_margin_loss multilabel_margin_loss_forward",
    ("h", "h"):
        "polar",
    ("hg", "hg"):
        "_cdist_forward _linalg_det _linalg_solve_ex linalg_cholesky_ex linalg_eig linalg_ldl_factor_ex "
        "linalg_ldl_solve linalg_lu_solve linalg_qr",
    ("hgFD", ""):
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
        "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w "
        "special_spherical_bessel_j0",
    ("hgFD", "hgFD"):
        "special_erfcx special_log_ndtr special_ndtri special_zeta",
    ("hgfdFD", "hgfdFD"):
        "bitwise_and bitwise_not bitwise_or bitwise_xor lcm",
    ("ucsil", "ucsil"):
        "im2col logaddexp logaddexp2",
    ("ucsilFD", "ucsilFD"):
        "_native_batch_norm_legit frac huber_loss native_batch_norm softplus",
}
_REFUSED = {name: {"cpu": cpu, "cuda": cuda} for (cpu, cuda), names in _TABLE.items() for name in names.split()}
#: whose numbers are settings of the kernel, in which the result's dtype has no part
_WITH_SETTINGS = frozenset("hardshrink softshrink softplus lerp lerp_ threshold celu elu rrelu_with_noise "
                           "smooth_l1_loss mse_loss".split())
#: which copy a tensor of no dimension before they look at its dtype
_ALONG_A_DIMENSION = frozenset(("cummax", "cummin", "kthvalue"))
#: which run as leaky_relu where they do not train, and look at a dtype before they look whether there are elements
#: (Activation.cpp; on CUDA, RreluWithNoise.cu, they look at the elements first)
_LEAKY_WHEN_EVALUATED = frozenset(("rrelu_with_noise", "rrelu_with_noise_"))
#: which work element by element before they reduce
_OF_ELEMENTS = frozenset(("smooth_l1_loss", "mse_loss"))
_PYTHON_NAMES = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
                 "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift"}


@functools.cache
def refused_dtypes(name: str, device_type: str) -> str:
    """The letters of the dtypes that an operator, or its form in place, is not there for."""
    inplace = name.removesuffix("_").replace("__i", "__")
    found = _REFUSED.get(name) or _REFUSED.get(name.removesuffix("_")) or _REFUSED.get(_PYTHON_NAMES.get(inplace, ""))
    return "" if found is None else found.get(device_type, "")


def promote_operands(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which an operator of elements computes: aten/src/ATen/native/TypeProperties.cpp, update_result_type_
    state and combine_categories, where a tensor without dimensions counts by its kind alone.
    """
    kinds: dict[bool, torch.dtype] = {}
    for t in tensors:
        found = kinds.get(bool(t.dim()))
        kinds[bool(t.dim())] = t.dtype if found is None else torch.promote_types(found, t.dtype)
    higher, lower = kinds.get(True), kinds.get(False)
    if higher is None or lower is None or higher.is_complex:
        return higher or lower or torch.get_default_dtype()
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    is_lifted = higher is torch.bool or lower.is_floating_point or lower.is_complex
    return torch.promote_types(higher, lower) if is_lifted else higher


def check_dtype(name: str, device_type: str, args: Sequence[Any], kwargs: dict[str, Any], is_pointwise: bool) -> None:
    """Raise NotImplementedError for a dtype without a kernel; most ask for none where there are no elements."""
    refused = refused_dtypes(name, device_type)
    if not refused:
        return
    if name in _LEAKY_WHEN_EVALUATED and not (args[4] if len(args) > 4 else kwargs.get("training")):
        refused = refused.replace("h", "")
    given = [a for a in args if isinstance(a, Tensor)]
    if not given or not given[0].dim() and name in _ALONG_A_DIMENSION:
        return
    if not all(t.numel() for t in given) and (device_type != "cpu" or name not in _LEAKY_WHEN_EVALUATED):
        return
    if not is_pointwise and name not in _OF_ELEMENTS:
        promoted = functools.reduce(torch.promote_types, (t.dtype for t in given))
        dtypes = {kwargs.get("dtype") or dtype for dtype in (promoted, given[0].dtype)}
    else:
        dtypes = {kwargs.get("dtype") or promote_operands(given)}
        if name not in _WITH_SETTINGS:  # a number of another kind may lift what it is computed in
            numbers = [a for a in args if isinstance(a, (bool, int, float, complex))]
            lifted = {torch.result_type(given[0], a) for a in numbers}
            dtypes = lifted if any(isinstance(a, complex) for a in numbers) else dtypes | lifted
    if all(_LETTERS.get(d, " ") in refused for d in dtypes):
        raise NotImplementedError(f'"{name}" not implemented for \'{name_dtype(given[0].dtype)}\'')
