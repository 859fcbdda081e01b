"""Layouts and dtypes of results where torch's meta kernels give others than the device."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

from analyzer.cuda.kernel_registry import device_shape, host_shape, overloads
from analyzer.cuda.workspaces.convolution import either_is_channels_last, suggests_channels_last
from analyzer.cuda.workspaces.kernel_temporary import uses_onednn
from analyzer.meta.dispatch.kernel import like_sum
from analyzer.meta.spec import TensorSpec, spec_of

Tensor = torch.Tensor
aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format


def _in_order(name: str, position: int | None = None) -> Callable[..., Any]:
    """The meta kernel of ``name`` with contiguous results; the first as the argument at ``position`` suggests."""
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


# zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT): BinaryOps.cpp, Loss.cpp. empty({0}) that is resized:
# GatedLinearUnit.cpp, cuda/ActivationGluKernel.cu. A contiguous copy: layer_norm.cpp, cuda/layer_norm_kernel.cu
for _name in ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward",
              "native_layer_norm_backward"):
    device_shape(_name, on_any_device=True)(_in_order(_name))


def _copied(self: Tensor, *args: Any, op: torch._ops.OpOverload) -> Tensor:
    op(self, *args)  # which refuses what it must
    return torch.empty_like(self)


# which write to a copy of the first argument (clone, Preserve): TensorAdvancedIndexing.cpp
for _name in ("index_fill.int_Scalar", "index_fill.int_Tensor"):
    device_shape(_name, on_any_device=True)(partial(_copied, op=overloads(_name)[0]))


# log_sigmoid_forward_cpu in Activation.cpp: both of a contiguous copy
host_shape("log_sigmoid_forward")(lambda self: (_laid_out(self), _laid_out(self)))


@host_shape("roll")
def _roll(self: Tensor, shifts: list[int], dims: list[int] = []) -> Tensor:  # noqa: B006
    """TensorTransformations.cpp: dimension after dimension, two parts put together the other way around."""
    if not dims or not self.numel():  # copied before dimensions are looked at
        return torch.empty_like(aten.roll.default(self, shifts, dims) if self.numel() else self)
    for shift, dim in zip(shifts, dims):
        start = -shift % self.shape[dim]
        self = torch.cat((self.narrow(dim, start, self.shape[dim] - start), self.narrow(dim, 0, start)), dim)
    return self


@host_shape("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> Any:
    """EmbeddingBag.cpp: the bag of each index is made with one more (make_offset2bag_out), and an index for each bag
    also where no maximum is looked for (make_max_indices_out). Indices and offsets are cast to one dtype before
    (promoteIndicesAndOffsets).
    """
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    indices, offsets = indices.to(dtype), offsets.to(dtype)
    out, bag, size, maximum = aten._embedding_bag.default(weight, indices, offsets, *args, **kwargs)
    if bag.numel():
        bag = bag.new_empty(bag.numel() + 1).resize_(bag.shape)
    return out, bag, size, maximum if maximum.numel() else torch.empty_like(size)


def _normalize_batch(name: str) -> Callable[..., Any]:
    """batch_norm_cpu in Normalization.cpp: moments are empty where running ones are used."""
    in_order, has_mean = _in_order(name, 0), not name.endswith("no_stats")
    def shape(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        args = _cut_to_channels(input, args)
        out, *moments = _cast_moments(in_order(input, *args, **kwargs), input, args[0])
        return (out, *(m.new_empty(0) if has_mean and not args[4] else m for m in moments))
    return shape


def _cut_to_channels(input: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Weights and statistics are read for the channels that there are: what is longer is not looked at."""
    channels = input.shape[1] if input.dim() > 1 else 0
    return tuple(a[:channels] if isinstance(a, Tensor) and channels and a.dim() == 1 and a.numel() > channels else a
                 for a in args)


@host_shape("_batch_norm_with_update")
def _normalize_and_update(input: Tensor, *args: Any) -> Any:
    """The same for torch.export's operator."""
    return aten._batch_norm_with_update.default(input, *_cut_to_channels(input, args))


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


device_shape("native_batch_norm_backward")(
    partial(_batch_norm_gradients, in_order=aten.native_batch_norm_backward.default))
host_shape("native_batch_norm_backward")(
    partial(_batch_norm_gradients, in_order=_in_order("native_batch_norm_backward", 1)))


def _normalize(*args: Any, op: torch._ops.OpOverload, weight: int) -> Any:
    return _cast_moments(op(*args), args[0], args[weight])


host_shape("native_layer_norm")(partial(_normalize, op=aten.native_layer_norm.default, weight=2))  # layer_norm.cpp


@host_shape("native_group_norm")
def _normalize_groups(input: Tensor, weight: Tensor | None, *args: Any) -> Any:
    """group_norm.cpp: the sizes that are given count, in whatever shape the elements come."""
    shape = args[1:4]
    given = input.reshape(shape) if input.shape[:2] != shape[:2] else input
    out, *moments = _normalize(given, weight, *args, op=aten.native_group_norm.default, weight=1)
    return out.view(input.shape), *moments


@host_shape("native_group_norm_backward")
def _group_norm_gradients(grad_out: Tensor, input: Tensor, *args: Any) -> Any:
    """group_norm.cpp: the input's gradient has its dtype, also where weights have another."""
    first, *rest = aten.native_group_norm_backward.default(grad_out, input, *args)
    return None if first is None else first.to(input.dtype), *rest


# Operands of gradients of activations, as positions among their arguments, in the order of Activation.cpp of
# ``aten/src/ATen/native``: TensorIterator takes the first that orders two dimensions. The CPU first casts operands to
# one dtype (TensorIterator.cpp, promote_inputs_to_common_dtype).
_OPERANDS = {"elu_backward": (0, 5), "hardtanh_backward": (0, 1), "hardsigmoid_backward": (0, 1),
             "hardswish_backward": (0, 1), "softplus_backward": (0, 1), "logit_backward": (0, 1),
             "threshold_backward": (1, 0), "leaky_relu_backward": (1, 0)}


def _iterate(*operands: Tensor, on_host: bool) -> Tensor:
    dtype = reduce(torch.promote_types, (t.dtype for t in operands))
    if on_host:
        operands = tuple(t.to(dtype) for t in operands)
    together = torch.broadcast_tensors(*operands)
    return torch.empty_strided(together[0].shape, compute_elementwise_output_strides(*together), dtype=dtype,
                               device=operands[0].device)


def _shape(*args: Any, positions: tuple[int, ...], on_host: bool) -> Tensor:
    return _iterate(*(args[i] for i in positions), on_host=on_host)


def _rrelu_gradient(gradient: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool,
                    is_result: bool, on_host: bool) -> Tensor:
    return _iterate(noise if training else self, gradient, on_host=on_host)


def _prelu_gradients(gradient: Tensor, self: Tensor, weight: Tensor, on_host: bool) -> tuple[Tensor, Tensor]:
    first = _iterate(self, weight, gradient, on_host=on_host)
    return first, torch.empty_like(first)


def _register(name: str, shape: Callable[..., Any]) -> None:
    device_shape(name)(partial(shape, on_host=False))
    host_shape(name)(partial(shape, on_host=True))


for _name, _positions in _OPERANDS.items():
    _register(_name, partial(_shape, positions=_positions))
_register("rrelu_with_noise_backward", _rrelu_gradient)
_register("_prelu_kernel_backward", _prelu_gradients)
# grad * mask * scale, Dropout.cpp; CUDA's own kernel is as torch's meta kernel says
host_shape("native_dropout_backward")(partial(_shape, positions=(0, 1), on_host=True))


# Layouts of what convolutions and their gradients give, which torch's meta kernels cannot know
# (``determine_backend_memory_format`` in Convolution.cpp and the functions of ConvUtils.h that it asks).

_Rule = Callable[[TensorSpec, TensorSpec, "list[int]", "list[int]", int], bool]
"""Whether a convolution of images and weights with these strides, dilations and groups is run channels last."""


def _on_device(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    return torch.backends.cudnn.enabled and suggests_channels_last(x, w)


def _on_host(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Volumes only in oneDNN, and there in no float64; images in the other kernels as well."""
    return either_is_channels_last(x, w) and (len(w) == 4 or uses_onednn(x, w, stride, dilation, groups))


def _lay_out(result: Tensor, input: Tensor, weight: Tensor, rule: _Rule, *settings: Any) -> Tensor:
    """``result`` as the backend lays it out; one dimension is run as two, of a contiguous input (view4d)."""
    if result.dim() == 3:
        input, weight = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
        return _lay_out(result.unsqueeze(2), input, weight, rule, *settings).squeeze(2)
    last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    is_last = rule(spec_of(input), spec_of(weight), *settings)
    return torch.empty_like(result, memory_format=last if is_last else torch.contiguous_format)


def _convolution(rule: _Rule) -> Callable[..., Tensor]:
    def shape(input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
              dilation: list[int], *rest: Any) -> Tensor:
        out = aten.convolution.default(input, weight, bias, stride, padding, dilation, *rest)
        return _lay_out(out, input, weight, rule, stride, dilation, rest[-1])
    return shape


def _gradients(rule: _Rule) -> Callable[..., Any]:
    def shape(gradient: Tensor, input: Tensor, weight: Tensor, *args: Any) -> Any:
        *found, of_bias = aten.convolution_backward.default(gradient, input, weight, *args)
        _, stride, _, dilation, _, _, groups, _ = args
        return (*(None if one is None else _lay_out(one, input, weight, rule, stride, dilation, groups)
                  for one in found), of_bias)
    return shape


device_shape("convolution")(_convolution(_on_device))
host_shape("convolution")(_convolution(_on_host))
device_shape("convolution_backward")(_gradients(_on_device))
host_shape("convolution_backward")(_gradients(_on_host))


def _like(position: int, layout: torch.memory_format = torch.contiguous_format) -> Callable[..., Tensor]:
    def shape(*args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(args[position], memory_format=layout)
    return shape


# Activation.cpp and cuda/RreluWithNoise.cu; Distributions.cpp: one draw for each element
device_shape("rrelu_with_noise", "_sample_dirichlet", "_standard_gamma", on_any_device=True)(_like(0))
device_shape("log_sigmoid_backward", on_any_device=True)(_like(0, torch.preserve_format))
# of `torch.nn.SyncBatchNorm`: cuda/Normalization.cu
device_shape("batch_norm_elemt")(_like(0, torch.preserve_format))
device_shape("batch_norm_backward_elemt")(_like(1, torch.preserve_format))
# aten/src/ATen/native/transformers/attention.cpp
device_shape("_masked_softmax")(_like(0))
# aten/src/ATen/native/cuda/MultiMarginLoss.cu, MultiLabelMarginCriterion.cu and FractionalMaxPool3d.cu
device_shape("multi_margin_loss_backward", "multilabel_margin_loss_backward", "fractional_max_pool3d_backward")(
    _like(1))
device_shape("silu_backward", "mish_backward", on_any_device=True)(like_sum)
device_shape("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine")(
    _like(0, torch.preserve_format))
