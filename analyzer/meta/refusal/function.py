"""What functions of elements, reductions, draws and decompositions refuse."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .rule import check_alpha, is_integral, name_dtype, refuses, wrap_dim

Tensor = torch.Tensor


@refuses("multinomial")
def multinomial(_: str, self: Tensor, num_samples: int, replacement: bool = False, *, out: Tensor | None = None,
                **_kwargs: Any) -> None:
    """aten/src/ATen/native/Distributions.cpp, multinomial_out."""
    if not self.dtype.is_floating_point:
        raise RuntimeError("multinomial only supports floating-point dtypes for input, got: " + name_dtype(self.dtype))
    if out is not None and out.dtype != torch.int64:
        raise RuntimeError(f"multinomial expects Long tensor out, got: {name_dtype(out.dtype)}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not 0 < self.dim() <= 2:
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if self.shape[-1] > 1 << 24:  # FLOAT32_MAX_CONSECUTIVE_INT
        raise RuntimeError("number of categories cannot exceed 2^24")


@refuses("bucketize")
def bucketize(_: str, self: Any, boundaries: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BucketizationUtils.h, searchsorted_pre_check."""
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    if boundaries.dtype.is_complex and boundaries.numel() and not (isinstance(self, Tensor) and not self.numel()):
        raise NotImplementedError(f'"searchsorted" not implemented for \'{name_dtype(boundaries.dtype)}\'')


@refuses("_pdist_forward")
def pdist(device_type: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/DistanceOpsKernel.cpp and cuda/DistanceKernel.cu: of at least two rows."""
    if self.shape[0] > 1 and self.shape[1] and self.dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f'"pdist" not implemented for \'{name_dtype(self.dtype)}\'')


@refuses("searchsorted")
def searchsorted(_: str, sorted_sequence: Tensor, self: Any, *_args: Any, sorter: Tensor | None = None,
                 **_kwargs: Any) -> None:
    """aten/src/ATen/native/BucketizationUtils.h, searchsorted_pre_check."""
    if sorter is not None and sorter.dtype != torch.int64:
        raise RuntimeError("torch.searchsorted(): sorter must be a tensor of long dtype but got dtype "
                           f"{name_dtype(sorter.dtype)}")
    if isinstance(self, Tensor) and self.dtype.is_complex and self.numel():
        raise NotImplementedError(f'"searchsorted" not implemented for \'{name_dtype(self.dtype)}\'')
    if not sorted_sequence.dim():
        raise RuntimeError("torch.searchsorted(): boundaries tensor should have positive dimension, but got 0 "
                           "dimension")


@refuses("complex", "polar")
def complex_of(_: str, first: Tensor, second: Tensor, *, out: Tensor | None = None) -> None:
    """aten/src/ATen/native/TensorFactories.cpp, complex_check_floating and complex_check_dtype."""
    for t in (first, second):
        if t.dtype not in (torch.float16, torch.float32, torch.float64):
            raise RuntimeError("Expected both inputs to be Half, Float or Double tensors but got "
                               f"{name_dtype(first.dtype)} and {name_dtype(second.dtype)}")
    if first.dtype != second.dtype:
        raise RuntimeError(f"Expected object of scalar type {name_dtype(first.dtype)} but got scalar type "
                           f"{name_dtype(second.dtype)} for second argument")
    if out is not None and out.dtype != first.dtype.to_complex():
        raise RuntimeError(f"Expected object of scalar type {name_dtype(first.dtype.to_complex())} but got scalar "
                           f"type {name_dtype(out.dtype)} for argument 'out'")


def _check_reduced(self: Tensor, dim: int, name: str = "") -> None:
    """aten/src/ATen/native/ReduceOpsUtils.h, zero_numel_check_dims: of no elements none is taken."""
    if self.numel() == 0 and self.shape[wrap_dim(dim, self.dim())] == 0:
        raise IndexError(f"{name}Expected reduction dim {dim} to have non-zero size.")


@refuses("amax", "amin", "aminmax")
def extremes(_: str, self: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None,
             min: Tensor | None = None, max: Tensor | None = None) -> None:
    """aten/src/ATen/native/ReduceOpsUtils.h, zero_numel_check_dims; ReduceAllOps.cpp and ReduceOps.cpp, aminmax."""
    for d in [dim] if isinstance(dim, int) else dim or ():
        _check_reduced(self, d)
    for given in (min, max):
        if given is not None and given.dtype != self.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {name_dtype(self.dtype)}, but got "
                               f"{name_dtype(given.dtype)} instead")


@refuses("linalg_vector_norm")
def vector_norm(_: str, self: Tensor, ord: Any = 2, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LinearAlgebra.cpp, the meta function of linalg_vector_norm."""
    if isinstance(ord, complex):
        raise RuntimeError("linalg.vector_norm: Expected a non-complex scalar as the order of norm.")


@refuses("roll")
def roll(_: str, self: Tensor, shifts: Any, dims: Any = (), **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorTransformations.h, roll_common. Along one dimension a tensor without elements is
    cloned before.
    """
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if self.numel() == 0 and len(shifts) == len(dims) == 1:
        return
    if not shifts:
        raise RuntimeError("`shifts` required")
    if not dims and len(shifts) == 1:
        return
    if len(shifts) != len(dims):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")


@refuses("_linalg_svd")
def svd(_: str, A: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BatchLinearAlgebra.cpp, svd_kernel, which a matrix without elements does not reach."""
    if A.numel() and (A.dtype in (torch.float16, torch.bfloat16) or is_integral(A)):
        raise NotImplementedError(f'"svd_cpu" not implemented for \'{name_dtype(A.dtype)}\'')


@refuses("add", "add_", "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_")
def add(_: str, self: Any, other: Any, alpha: Any = 1, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BinaryOps.cpp, the meta function of add; ForeachOpsKernels.cpp, which adds one by one."""
    if type(alpha) is int:
        return
    if not isinstance(self, (list, tuple)):
        check_alpha(self, other, alpha)
        return
    for pair in zip(self, other if isinstance(other, (list, tuple)) else [other] * len(self)):
        check_alpha(*pair, alpha)


@refuses("sub", "sub_", "rsub")
def subtract(_: str, self: Any, other: Any, alpha: Any = 1, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BinaryOps.h, sub_check and alpha_check."""
    _refuse_boolean_difference(self, other)
    add(_, self, other, alpha)


@refuses("dist")
def dist(_: str, self: Any, other: Any, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/ReduceOps.cpp, dist, which subtracts."""
    _refuse_boolean_difference(self, other)


def _refuse_boolean_difference(self: Any, other: Any) -> None:
    if any(isinstance(x, Tensor) and x.dtype is torch.bool for x in (self, other)):
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to "
                           "invert a mask, use the `~` or `logical_not()` operator instead.")


@refuses("cat")
def cat(_: str, tensors: Sequence[Tensor], *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorShape.h, check_cat_no_zero_dim."""
    for i, t in enumerate(tensors):
        if not t.dim():
            raise RuntimeError(f"zero-dimensional tensor (at position {i}) cannot be concatenated")


def _one_of_none(name: str, self: Tensor, args: tuple[Any, ...], named: dict[str, Any], default: Any = None) -> None:
    """The same for the dimension of a call; without one, and without a ``default``, nothing is checked."""
    dim = named.get("dim", args[0] if args else default)
    if isinstance(dim, int):
        _check_reduced(self, dim, f"{name}(): ")


@refuses("max")
def largest(_: str, self: Tensor, *args: Any, **named: Any) -> None:
    """The same, and aten/src/ATen/native/ReduceAllOps.cpp, max; with two tensors it takes the larger of each pair."""
    _extreme("max", self, args, named)


@refuses("min")
def least(_: str, self: Tensor, *args: Any, **named: Any) -> None:
    """As ``max``."""
    _extreme("min", self, args, named)


def _extreme(name: str, self: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    _one_of_none(name, self, args, named)
    if not args and not {"dim", "other"} & named.keys() and self.numel() == 0:
        raise RuntimeError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
                           "reduction dim with the 'dim' argument.")


@refuses("mode")
def mode(_: str, self: Tensor, *args: Any, **named: Any) -> None:
    """aten/src/ATen/native/Sorting.cpp, mode_out, which takes the last dimension where none is given."""
    _one_of_none("mode", self, args, named, -1)


@refuses("median", "nanmedian")
def median(device_type: str, self: Tensor, *args: Any, **named: Any) -> None:
    """aten/src/ATen/native/Sorting.cpp, median_with_indices_impl, which nanmedian calls too, and
    aten/src/ATen/cuda/detail/TensorInfo.cuh, MAX_TENSORINFO_DIMS; 25 are too many, as torch's tests of it say.
    """
    _one_of_none("median", self, args, named)
    if device_type == "cuda" and self.dim() >= 25:
        raise RuntimeError("CUDA Tensors cannot have more than 25 dimensions")


@refuses("sort", "argsort")
def sort(_: str, self: Tensor, dim: Any = -1, *_args: Any, **named: Any) -> None:
    """aten/src/ATen/native/Sorting.cpp, the meta function of sort."""
    dim = named.get("dim", dim)
    if not isinstance(dim, bool):  # which is what comes first where the dimension is named
        wrap_dim(dim, self.dim())


@refuses("round", "round_")
def round_to(_: str, self: Tensor, *, decimals: int | None = None, out: Tensor | None = None) -> None:
    """aten/src/ATen/native/cpu/UnaryOpsKernel.cpp, round_decimals_kernel, and cuda/UnaryFractionKernels.cu."""
    if decimals is not None and self.numel() and not self.dtype.is_floating_point:
        raise NotImplementedError(f'"round_cpu" not implemented for \'{name_dtype(self.dtype)}\'')


@refuses("mvlgamma", "mvlgamma_")
def mvlgamma(_: str, self: Tensor, p: int, **_kwargs: Any) -> None:
    """aten/src/ATen/native/UnaryOps.cpp, mvlgamma_check."""
    if self.dtype is torch.bool:
        raise RuntimeError("The input tensor may not be a boolean tensor.")
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")


@refuses("div", "div_", "divide", "divide_")
def divide(_: str, self: Any, other: Any, *, rounding_mode: str | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/BinaryOps.cpp, the meta function of div; cpu/BinaryOpsKernel.cpp, div_trunc_kernel and
    div_floor_kernel, and those of CUDA.
    """
    given = [x for x in (self, other) if isinstance(x, Tensor)]
    if rounding_mode not in (None, "trunc", "floor"):
        raise RuntimeError("div expected rounding_mode to be one of None, 'trunc', or 'floor' but found "
                           f"'{rounding_mode}'")
    if rounding_mode is None or not all(t.numel() for t in given):
        return
    dtypes = {t.dtype for t in given}
    is_bool = dtypes == {torch.bool} and all(isinstance(x, (Tensor, bool)) for x in (self, other))
    if is_bool or any(d.is_complex for d in dtypes) or isinstance(other, complex):
        name = "Bool" if is_bool else next((name_dtype(d) for d in dtypes if d.is_complex), "ComplexFloat")
        raise NotImplementedError(f'"div_{rounding_mode}" not implemented for \'{name}\'')


@refuses("floor_divide", "floor_divide_")
def floor_divide(device_type: str, self: Any, other: Any, **_kwargs: Any) -> None:
    """The same kernel."""
    divide(device_type, self, other, rounding_mode="floor")


@refuses("cummax", "cummin", "_cummax_helper", "_cummin_helper")
def extremes_so_far(_: str, self: Tensor, *args: Any, **named: Any) -> None:
    """aten/src/ATen/native/ReduceOpsUtils.h, zero_numel_check; ReduceOps.cpp, cummax_out."""
    dim = args[-1] if args else named.get("dim", 0)
    if isinstance(dim, int) and not self.dim() and dim not in (-1, 0):
        raise IndexError(f"Expected reduction dim -1 or 0 for scalar but got {dim}")


@refuses("cumsum_", "cumprod_")
def accumulate_in_place(device_type: str, self: Tensor, dim: int, **_kwargs: Any) -> None:
    """The same, where the dtype is that of the tensor."""
    accumulate(device_type, self, dim, dtype=self.dtype)


@refuses("cumsum", "cumprod")
def accumulate(_: str, self: Tensor, dim: int, *, dtype: torch.dtype | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/ReduceOpsKernel.cpp, cumsum_cpu_kernel; integers are otherwise summed in int64."""
    if dtype is torch.bool and self.numel() and self.dim():
        raise NotImplementedError("\"cumsum\" not implemented for 'Bool'")


@refuses("_fft_r2c", "_fft_c2r", "_fft_c2c")
def transform(device_type: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/mkl/SpectralOps.cpp, which has kernels for two dtypes; cuFFT has one for half."""
    if device_type == "cpu" and self.dtype in (torch.float16, torch.bfloat16, torch.complex32):
        raise RuntimeError(f"MKL FFT doesn't support tensors of type: {name_dtype(self.dtype)}")


@refuses("addr_")
def add_outer_product(_: str, self: Tensor, vec1: Tensor, vec2: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LinearAlgebra.cpp, addr_: the tensor has the shape of the product."""
    if tuple(self.shape) != (*vec1.shape, *vec2.shape):
        raise RuntimeError(f"size mismatch, input: {list(self.shape)}, v1: {list(vec1.shape)}, v2: {list(vec2.shape)}")


@refuses("addmm", "addmm_", "addbmm", "addbmm_", "addr")
def add_product(_: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/ExpandUtils.h: what is added is expanded to the sizes of a matrix."""
    _check_expanded(self, 2)


@refuses("baddbmm", "baddbmm_")
def add_products(_: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """The same of a batch of matrices."""
    _check_expanded(self, 3)


def _check_expanded(tensor: Tensor, dims: int) -> None:
    if tensor.dim() > dims:
        raise RuntimeError(f"expand({list(tensor.shape)}): the number of sizes provided ({dims}) must be greater or "
                           f"equal to the number of dimensions in the tensor ({tensor.dim()})")


@refuses("clamp", "clamp_")
def clamp(device_type: str, self: Tensor, min: Any = None, max: Any = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorCompare.cpp, clamp; cpu/TensorCompareKernel.cpp, clamp_kernel_impl, for two tensors of
    bounds.
    """
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    given = [x for x in (self, min, max) if isinstance(x, Tensor)]
    if len(given) == 3 and all(t.numel() and t.dtype is torch.bool for t in given):
        raise NotImplementedError(f"\"clamp_{device_type}\" not implemented for 'Bool'")


@refuses("pow", "pow_")
def power(_: str, self: Any, exponent: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Pow.cpp, the meta function of a tensor and a number."""
    if isinstance(self, Tensor) and is_integral(self) and type(exponent) is int and exponent < 0:
        raise RuntimeError("Integers to negative integer powers are not allowed.")
