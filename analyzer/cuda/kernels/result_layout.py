"""Layouts and dtypes of results where torch's meta kernel gives others than the device's: what the meta kernel says,
with what the sources named here change. Those of the CPU are met by running its kernels.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from analyzer.cuda.kernel_registry import device_shape, host_shape, overloads

Tensor = torch.Tensor
aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format


def _in_order(name: str, position: int | None = None) -> Callable[..., Any]:
    """The meta kernel of the operator ``name`` with contiguous results; the first in the memory format that the
    argument at ``position`` suggests, where one is given.
    """
    op = overloads(name)[0]

    def shape(*args: Any, **kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        first, *rest = results if isinstance(results, tuple) else (results,)
        layout = _CONTIGUOUS if position is None else suggest_memory_format(args[position])
        first = None if first is None else _laid_out(first, layout)
        rest = [None if result is None else _laid_out(result) for result in rest]
        return (first, *rest) if isinstance(results, tuple) else first
    return shape


def _laid_out(result: Tensor, layout: torch.memory_format = _CONTIGUOUS) -> Tensor:
    return torch.empty_like(result, memory_format=layout)


# zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT): BinaryOps.cpp and Loss.cpp. empty({0}) that is resized:
# GatedLinearUnit.cpp and cuda/ActivationGluKernel.cu. empty_like of a contiguous copy: layer_norm.cpp and
# cuda/layer_norm_kernel.cu
for _name in ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward",
              "native_layer_norm_backward"):
    device_shape(_name, on_any_device=True)(_in_order(_name))


def _copied(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The meta kernel of an operator that writes to a copy of its first argument (clone, Preserve)."""
    def shape(self: Tensor, *args: Any) -> Tensor:
        op(self, *args)  # which refuses what it must
        return torch.empty_like(self)
    return shape


for _name in ("index_fill.int_Scalar", "index_fill.int_Tensor"):  # TensorAdvancedIndexing.cpp
    device_shape(_name, on_any_device=True)(_copied(overloads(_name)[0]))


@host_shape("log_sigmoid_forward")
def _log_sigmoid(self: Tensor) -> tuple[Tensor, Tensor]:
    """log_sigmoid_forward_cpu in Activation.cpp: both of a contiguous copy."""
    return _laid_out(self), _laid_out(self)


@host_shape("roll")
def _roll(self: Tensor, shifts: list[int], dims: list[int] = []) -> Tensor:  # noqa: B006
    """TensorTransformations.cpp: dimension after dimension, two parts put together the other way around."""
    if not dims or not self.numel():
        return torch.empty_like(aten.roll.default(self, shifts, dims))
    for shift, dim in zip(shifts, dims):
        start = -shift % self.shape[dim]
        self = torch.cat((self.narrow(dim, start, self.shape[dim] - start), self.narrow(dim, 0, start)), dim)
    return self


@host_shape("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> Any:
    """EmbeddingBag.cpp: the bag of each index is made with one more (make_offset2bag_out), and an index for each bag
    also where no maximum is looked for (make_max_indices_out).
    """
    out, bag, size, maximum = aten._embedding_bag.default(weight, indices, offsets, *args, **kwargs)
    if bag.numel():
        bag = bag.new_empty(bag.numel() + 1).resize_(bag.shape)
    return out, bag, size, maximum if maximum.numel() else torch.empty_like(size)


def _normalize_batch(name: str) -> Callable[..., Any]:
    """batch_norm_cpu in Normalization.cpp: moments are empty where running ones are used."""
    in_order, has_mean = _in_order(name, 0), not name.endswith("no_stats")

    def shape(input: Tensor, weight: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        out, *moments = _cast_moments(in_order(input, weight, *args, **kwargs), input, weight)
        return (out, *(m.new_empty(0) if has_mean and not args[3] else m for m in moments))
    return shape


def _cast_moments(results: tuple[Tensor, ...], input: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    """The results of a norm, all but the first in the dtype of the weight, or of the input without one."""
    out, *moments = results
    dtype = input.dtype if weight is None else weight.dtype
    return (out, *(m.to(dtype) for m in moments))


for _name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"):
    host_shape(_name)(_normalize_batch(_name))


def _batch_norm_gradients(*args: Any, in_order: Callable[..., Any]) -> Any:
    """A gradient of the input where one is asked for: batch_norm_backward_cpu_template in Normalization.cpp, and
    batch_norm_backward_cuda_template in cuda/Normalization.cuh.
    """
    first, *rest = in_order(*args)
    return first if args[-1][0] else None, *rest


@device_shape("native_batch_norm_backward")
def _batch_norm_gradients_on_device(*args: Any) -> Any:
    return _batch_norm_gradients(*args, in_order=aten.native_batch_norm_backward.default)


@host_shape("native_batch_norm_backward")
def _batch_norm_gradients_on_host(*args: Any) -> Any:
    return _batch_norm_gradients(*args, in_order=_in_order("native_batch_norm_backward", 1))


@host_shape("native_layer_norm")
def _normalize_layer(input: Tensor, normalized_shape: list[int], weight: Tensor | None, *args: Any) -> Any:
    """layer_norm.cpp."""
    return _cast_moments(aten.native_layer_norm.default(input, normalized_shape, weight, *args), input, weight)


@host_shape("native_group_norm")
def _normalize_group(input: Tensor, weight: Tensor | None, *args: Any) -> Any:
    """group_norm.cpp."""
    return _cast_moments(aten.native_group_norm.default(input, weight, *args), input, weight)


@host_shape("native_group_norm_backward")
def _group_norm_gradients(grad_out: Tensor, input: Tensor, *args: Any) -> Any:
    """group_norm.cpp: the input's gradient has its dtype, also where weights have another."""
    first, *rest = aten.native_group_norm_backward.default(grad_out, input, *args)
    return None if first is None else first.to(input.dtype), *rest
