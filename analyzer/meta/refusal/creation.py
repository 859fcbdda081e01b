"""What draws of random numbers and functions that make tensors refuse."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .rule import expands, is_integral, name_dtype, refuses

Tensor = torch.Tensor


@refuses("bernoulli")
def bernoulli(device_type: str, self: Tensor, p: float | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/DistributionTemplates.h, bernoulli_kernel, where the tensor has the probabilities."""
    if p is None and not self.dtype.is_floating_point and self.numel():
        raise NotImplementedError(f'"bernoulli_tensor_{device_type}_p_" not implemented for '
                                  f"'{name_dtype(self.dtype)}'")


_BOUNDS = {torch.bool: (0, 1), torch.float16: (-65504, 65504), **{
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}}


@refuses("randint", "randint_like")
def random_between(_: str, *args: Any, dtype: torch.dtype | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, check_from_to_in_range."""
    numbers = [a for a in args if isinstance(a, int)]
    if not numbers:  # the end is a tensor's number
        return
    least, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    _check_ends(least, end)
    like = args[0].dtype if isinstance(args[0], Tensor) else torch.int64
    _check_range(least, end, dtype or like)


def _check_range(least: int, end: int, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise RuntimeError("check_random_bounds handles only integral, floating-point and boolean types")
    if dtype in _BOUNDS:
        low, high = _BOUNDS[dtype]
        for name, value in (("from", least), ("to - 1", end - 1)):
            if not low <= value <= high:
                raise RuntimeError(f"{name} is out of bounds for {name_dtype(dtype)}")


@refuses("random_")
def random_in_place(device_type: str, self: Tensor, *numbers: int | None, generator: Any = None,
                    **named: int | None) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, random_impl and random_from_to, which checks before it looks
    whether there are elements.
    """
    bounds = [*numbers, *named.values()]
    if not bounds or bounds[-1] is None:  # up to the largest of the dtype
        if self.dtype.is_complex and self.numel():
            raise NotImplementedError(f'"random_kernel_{device_type}" not implemented for \'{name_dtype(self.dtype)}\'')
        return
    least, end = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    if least is not None and end is not None:
        _check_ends(least, end)
        _check_range(least, end, self.dtype)


def _check_ends(least: int, end: int) -> None:
    if least >= end:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={least} >= to={end}")


@refuses("bernoulli_")
def bernoulli_in_place(_: str, self: Tensor, p: float | Tensor = 0.5, **_kwargs: Any) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, bernoulli_impl_, and expand_inplace."""
    if not isinstance(p, Tensor):
        if not 0 <= p <= 1:
            raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")
    elif self.numel() and not expands(p.shape, self.shape):
        raise RuntimeError(f"expand({list(p.shape)}): probabilities do not expand to the size {list(self.shape)} of "
                           "what is drawn")


@refuses("uniform_")
def uniform(_: str, self: Tensor, start: float = 0.0, end: float = 1.0, *, generator: Any = None,
            **named: float) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, uniform_impl_, which looks at bounds of a real dtype before it
    looks whether there are elements.
    """
    start, end = named.get("from", start), named.get("to", end)
    if self.dtype.is_complex and not self.numel():
        return
    if is_integral(self):
        raise NotImplementedError(f'"check_uniform_bounds" not implemented for \'{name_dtype(self.dtype)}\'')
    if start > end:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={start:g} > to={end:g}")


@refuses("rand_like", "rand")
def draw_uniformly(_: str, *args: Any, dtype: torch.dtype | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, uniform_impl_: check_uniform_bounds."""
    found = dtype or (args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype())
    if not (found.is_floating_point or found.is_complex):
        raise NotImplementedError(f'"check_uniform_bounds" not implemented for \'{name_dtype(found)}\'')


@refuses("normal")
def draw_normally(device_type: str, mean: Any, std: Any = 1.0, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, CHECK_NORMAL_TENSOR_STD and normal_out_impl."""
    if isinstance(std, Tensor) and std.dtype.is_complex:
        raise RuntimeError("normal expects standard deviation to be non-complex")
    result = mean if isinstance(mean, Tensor) else std
    if isinstance(result, Tensor) and is_integral(result) and result.numel():
        raise NotImplementedError(f'"normal_kernel_{device_type}" not implemented for \'{name_dtype(result.dtype)}\'')


@refuses("normal_")
def draw_normally_in_place(device_type: str, self: Tensor, mean: float = 0.0, std: float = 1.0,
                           **_kwargs: Any) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, normal_impl_."""
    if std >= 0:  # else the shape's own check refuses it
        draw_normally(device_type, self, std)


@refuses("poisson")
def poisson(device_type: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Distributions.cpp and cuda/Distributions.cu: the rates' dtype is that of the draws."""
    if not self.dtype.is_floating_point:
        raise NotImplementedError(f'"poisson_{device_type}" not implemented for \'{name_dtype(self.dtype)}\'')


@refuses("linspace", "logspace")
def space(_: str, start: Any, end: Any, *_args: Any, dtype: torch.dtype | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorFactories.cpp, linspace and logspace."""
    is_complex = any(isinstance(x, complex) or isinstance(x, Tensor) and x.dtype.is_complex for x in (start, end))
    if is_complex and dtype is not None and not dtype.is_complex:
        raise RuntimeError("torch.linspace(): inferred dtype c10::complex<float> can't be safely cast to passed dtype "
                           f"{name_dtype(dtype)}")


@refuses("empty_strided")
def empty_strided(_: str, size: Sequence[int], stride: Sequence[int], **_kwargs: Any) -> None:
    """aten/src/ATen/EmptyTensor.cpp, computeStorageNbytes."""
    if 0 not in size and any(step < 0 and n > 1 for n, step in zip(size, stride)):
        raise RuntimeError(f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")


@refuses("new_empty_strided")
def new_empty_strided(_: str, self: Tensor, size: Sequence[int], stride: Sequence[int], **_kwargs: Any) -> None:
    """The same."""
    empty_strided(_, size, stride)


@refuses("arange")
def arange(device_type: str, *_args: Any, dtype: torch.dtype | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp and cuda/RangeFactories.cu have no kernel for truth values."""
    if dtype is torch.bool:
        raise NotImplementedError(f'"arange_{device_type}" not implemented for \'Bool\'')
