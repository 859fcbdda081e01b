"""Calls that torch's meta kernels refuse and kernels of devices run: without elements they return before they check."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape, host_shape

Tensor = torch.Tensor
aten = torch.ops.aten


@host_shape("bmm")
def _multiply_batches(self: Tensor, mat2: Tensor, **_named: Any) -> Any:
    """LinearAlgebra.cpp, bmm_out_or_baddbmm_: where nothing is multiplied, dtypes are not compared."""
    is_empty = self.dim() == mat2.dim() == 3 and not (self.numel() and mat2.numel())
    if is_empty and self.dtype != mat2.dtype and self.shape[::2] == (mat2.shape[0], mat2.shape[1]):
        return mat2.new_empty((*self.shape[:2], mat2.shape[2]))
    return aten.bmm.default(self, mat2)


@device_shape("roll")
def roll(self: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """cuda/TensorTransformations.cu: a tensor without elements is copied before dimensions are looked at."""
    return aten.roll.default(self, shifts, dims) if self.numel() else torch.empty_like(self)


@device_shape("repeat", on_any_device=True)
def _repeat(self: Tensor, repeats: Sequence[int]) -> Any:
    """TensorShape.cpp: a size of zero may be repeated a negative number of times."""
    padded = (*[1] * (len(repeats) - self.dim()), *self.shape)
    shape = [size * count for size, count in zip(padded, repeats)]
    if min(repeats, default=0) < 0 and min(shape) >= 0 and len(padded) == len(repeats):
        return self.new_empty(shape)
    return aten.repeat.default(self, repeats)


@device_shape("_log_softmax", on_any_device=True)
def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Any:
    """SoftMax.cpp and cuda/SoftMax.cu: without elements there is no kernel to choose by the dtype."""
    if self.numel() or self.dtype.is_floating_point:
        return aten._log_softmax.default(self, dim, half_to_float)
    return torch.empty_like(self, memory_format=torch.contiguous_format)


@device_shape("randn_like", on_any_device=True)
def _draw_like(self: Tensor, **named: Any) -> Any:
    """DistributionTemplates.h, normal_impl_: a tensor without elements stays as it is."""
    return aten.randn_like.default(self, **named) if self.numel() else torch.empty_like(self, **named)


@device_shape("normal.Tensor_float", on_any_device=True)
def _draw_around(mean: Tensor, std: float = 1, **named: Any) -> Any:
    """DistributionTemplates.h, normal_out_impl: means may be complex, and of any dtype where there are none."""
    if std >= 0 and (mean.dtype.is_complex or not mean.numel()):
        return torch.empty_like(mean, memory_format=torch.contiguous_format)
    return aten.normal.Tensor_float(mean, std, **named)


def _of_nothing(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """DistributionTemplates.h, CHECK_EMPTY_AND_RETURN: without elements no kernel is chosen by the dtype, and what a
    distribution is drawn with has been checked.
    """
    def draw(self: Tensor, *args: Any, **named: Any) -> Any:
        if self.numel():
            return op(self, *args, **named)
        op(torch.empty(0, device=self.device), *args, **named)
        return self
    return draw


for _name in ("normal_", "exponential_", "log_normal_", "geometric_"):
    device_shape(_name, on_any_device=True)(_of_nothing(getattr(aten, _name).default))


def _with_tensor_of_scalars(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """ForeachUtils.h, convert_tensor_to_scalar_list: a number for each tensor of the lists, read on the host."""
    def shape(self: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], scalars: Tensor) -> Any:
        if scalars.dim() != 1:
            raise RuntimeError(f"Expected packed scalar Tensor to be of dimension 1. Got {scalars.dim()} instead.")
        if scalars.shape[0] != len(self):
            raise RuntimeError(f"Expected length of scalars to match input of length {len(self)} but got "
                               f"{scalars.shape[0]} instead.")
        one = torch.ones((), dtype=scalars.dtype, device="cpu").item()
        return op(self, first, second, [one] * len(self))
    return shape


for _name in ("_foreach_addcdiv", "_foreach_addcdiv_", "_foreach_addcmul", "_foreach_addcmul_"):
    device_shape(f"{_name}.Tensor", on_any_device=True)(_with_tensor_of_scalars(getattr(aten, _name).ScalarList))


@host_shape("grid_sampler_2d")
def _sample_grid(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int,
                 align_corners: bool) -> Any:
    """cpu/GridSamplerKernel.cpp takes numbers that stand for no mode; `torch.nn.functional.grid_sample` gives none."""
    modes = [mode if mode in range(3) else 0 for mode in (interpolation_mode, padding_mode)]
    return aten.grid_sampler_2d.default(input, grid, *modes, align_corners)


@device_shape("_unsafe_masked_index", on_any_device=True)
def _take_masked(self: Tensor, mask: Tensor, *args: Any) -> Any:
    """TensorAdvancedIndexing.cpp: the mask is used by ``logical_not``, which takes any dtype."""
    return aten._unsafe_masked_index.default(self, mask.bool(), *args)


@device_shape("_unsafe_masked_index_put_accumulate", on_any_device=True)
def _put_masked(self: Tensor, mask: Tensor, *args: Any) -> Any:
    """The same of what is added up in a copy of the first argument."""
    return aten._unsafe_masked_index_put_accumulate.default(self, mask.bool(), *args)


def _unbatched(op: torch._ops.OpOverload, at: int) -> Callable[..., Any]:
    """LossNLL.cpp: the label of one sample without a batch may be a vector of one."""
    def shape(*args: Any, **named: Any) -> Any:
        self, target, *rest = args[at:]
        target = target[0] if self.dim() == 1 and tuple(target.shape) == (1,) else target
        return op(*args[:at], self, target, *rest, **named)
    return shape


def _with_any_weight(op: torch._ops.OpOverload, at: int) -> Callable[..., Any]:
    """LossNLL2d.cpp: the weight has as many elements as there are classes, in whatever shape."""
    def shape(*args: Any, **named: Any) -> Any:
        return op(*(a.reshape(-1) if i == at and a is not None else a for i, a in enumerate(args)), **named)
    return shape


for _kind, _at in (("forward", 0), ("backward", 1)):
    device_shape(f"nll_loss_{_kind}", on_any_device=True)(_unbatched(getattr(aten, f"nll_loss_{_kind}").default, _at))
    device_shape(f"nll_loss2d_{_kind}", on_any_device=True)(
        _with_any_weight(getattr(aten, f"nll_loss2d_{_kind}").default, _at + 2))


def _with_one_index_dtype(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """cuda/EmbeddingBag.cu, promoteIndicesAndOffsets: indices and offsets are cast to one dtype before."""
    def shape(weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any, **named: Any) -> Any:
        dtype = torch.promote_types(indices.dtype, offsets.dtype)
        return op(weight, indices.to(dtype), offsets.to(dtype), *args, **named)
    return shape


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    device_shape(_name)(_with_one_index_dtype(getattr(aten, _name).default))
