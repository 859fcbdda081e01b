"""What layers refuse: convolutions, norms, softmax, losses, embeddings."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .rule import is_integral, name_dtype, refuses, wrap_dim

Tensor = torch.Tensor


@refuses("convolution", "_convolution", "convolution_overrideable")
def convolution(device_type: str, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
                padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
                groups: int, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Convolution.cpp, check_shape_forward and _convolution."""
    shape = list(weight.shape)
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if any(p < 0 for p in padding):
        raise RuntimeError("negative padding is not supported")
    if any(p < 0 for p in output_padding):
        raise RuntimeError("negative output_padding is not supported")
    if any(s <= 0 for s in stride):
        raise RuntimeError("non-positive stride is not supported")
    if any(d <= 0 for d in dilation):
        raise RuntimeError("dilation should be greater than zero")
    if weight.dim() < 3:
        raise RuntimeError("weight should have at least three dimensions")
    if input.dim() != weight.dim():
        raise RuntimeError(f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight {shape}, "
                           f"but got {input.dim()}-dimensional input of size {list(input.shape)} instead")
    if shape[0] < groups:
        raise RuntimeError(f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but got "
                           f"weight of size {shape} instead")
    if shape[0] % groups:
        raise RuntimeError(f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but "
                           f"got weight of size {shape} instead")
    channels = shape[0] if transposed else shape[1] * groups
    if input.shape[1] != channels:
        raise RuntimeError(f"Given {'transposed=1' if transposed else f'groups={groups}'}, weight of size {shape}, "
                           f"expected input{list(input.shape)} to have {channels} channels, but got "
                           f"{input.shape[1]} channels instead")
    outputs = shape[1] * groups if transposed else shape[0]
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise RuntimeError(f"Given {'transposed=1, ' if transposed else ''}weight of size {shape}, expected bias to be "
                           f"1-dimensional with {outputs} elements, but got bias of size {list(bias.shape)} instead")
    if device_type == "cuda" and is_integral(input):  # cuDNN has none, cuda/ConvolutionMM2d.cu is for floats
        raise NotImplementedError(f'"slow_conv2d_cuda" not implemented for \'{name_dtype(input.dtype)}\'')
    if transposed:
        _check_output_padding(stride, dilation, output_padding, weight.dim() - 2)


def _check_output_padding(stride: Sequence[int], dilation: Sequence[int], output_padding: Sequence[int],
                          dims: int) -> None:
    """aten/src/ATen/native/NaiveConvolutionTranspose2d.cpp, slow_conv_transpose2d_shape_check, and that of 3d."""
    def each(sizes: Sequence[int]) -> list[int]:
        return list(sizes) * dims if len(sizes) == 1 else list(sizes)

    for s, d, p in zip(each(stride), each(dilation), each(output_padding)):
        if p >= s and p >= d:
            raise RuntimeError("output padding must be smaller than either stride or dilation, but got output_padding "
                               f"{list(output_padding)}, stride {list(stride)}, dilation {list(dilation)}")


@refuses("_softmax", "_log_softmax")
def softmax(_: str, self: Tensor, dim: int, half_to_float: bool, **_kwargs: Any) -> None:
    """aten/src/ATen/native/SoftMax.cpp, the meta functions softmax and log_softmax, and AT_DISPATCH of the kernels."""
    wrap_dim(dim, self.dim())
    if self.numel() and not self.dtype.is_floating_point:
        raise NotImplementedError(f'"softmax_kernel_impl" not implemented for \'{name_dtype(self.dtype)}\'')


@refuses("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(_: str, self: Tensor, target: Tensor, weight: Tensor | None, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossNLL.cpp, nll_loss_out_frame, and cuda/NLLLoss2d.cu: labels are int64 or uint8."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected scalar type Long but found {name_dtype(target.dtype)}")
    if not self.dtype.is_floating_point:
        raise NotImplementedError(f'"nll_loss_out_frame" not implemented for \'{name_dtype(self.dtype)}\'')
    if weight is not None and weight.dtype != self.dtype:
        raise RuntimeError(f"expected scalar type {name_dtype(self.dtype)} but found {name_dtype(weight.dtype)}")


@refuses("_fused_rms_norm")
def rms_norm(_: str, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None,
             *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/layer_norm.h, _check_rms_norm_inputs_symint."""
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError(f"Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
                           f"element, but got normalized_shape = {shape}")
    if weight is not None and list(weight.shape) != shape:
        raise RuntimeError(f"Expected weight to be of same shape as normalized_shape, but got weight of shape "
                           f"{list(weight.shape)} and normalized_shape = {shape}")
    if list(input.shape[-len(shape):]) != shape:
        raise RuntimeError(f"Given normalized_shape={shape}, expected input with shape [*, {', '.join(map(str, shape))}"
                           f"], but got input of size {list(input.shape)}")


@refuses("embedding")
def embedding(_: str, weight: Tensor, indices: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Embedding.cpp, embedding_symint."""
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, "
                           f"Int; but got {name_dtype(indices.dtype)} instead (while checking arguments for embedding)")


@refuses("multi_margin_loss")
def multi_margin_loss(_: str, self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
                      *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossMulti.h, multi_margin_loss_shape_check."""
    if p not in (1, 2):
        raise RuntimeError("only p == 1 and p == 2 supported")
    if self.dim() > 2 or self.numel() == 0 and not (self.dim() == 2 and self.shape[1] != 0):
        raise RuntimeError("Expected non-empty vector or matrix with optional 0-dim batch size, but got: "
                           f"{list(self.shape)}")
    frames = self.shape[0] if self.dim() == 2 else 1
    classes = self.shape[-1] if self.dim() else 1
    if target.dim() > 1 or target.numel() != frames:
        raise RuntimeError(f"inconsistent target size, expected {frames} but got {list(target.shape)}")
    if weight is not None and (weight.dim() > 1 or weight.numel() != classes):
        raise RuntimeError(f"inconsistent weight size, expected {classes} but got {list(weight.shape)}")
    if target.dtype != torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {name_dtype(target.dtype)}")
    if weight is not None and weight.dtype != self.dtype:
        raise RuntimeError(f"expected scalar type {name_dtype(self.dtype)} but found {name_dtype(weight.dtype)}")


@refuses("multilabel_margin_loss_forward")
def multilabel_margin_loss(_: str, self: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossMulti.h, multilabel_margin_loss_shape_check."""
    if self.dim() > 2 or self.numel() == 0 and not (self.dim() == 2 and self.shape[1] != 0):
        raise RuntimeError("Expected non-empty vector or matrix with optional 0-dim batch size, but got: "
                           f"{list(self.shape)}")
    wanted = tuple(self.shape) or (1,)
    if tuple(target.shape) != wanted and (self.dim() or target.numel() != 1):
        raise RuntimeError(f"inconsistent target size: {list(target.shape)} for input of size: {list(self.shape)}")
    if target.dtype != torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {name_dtype(target.dtype)}")


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


@refuses("uniform_")
def uniform(_: str, self: Tensor, start: float = 0.0, end: float = 1.0, *, generator: Any = None,
            **named: float) -> None:
    """aten/src/ATen/native/DistributionTemplates.h, uniform_impl_."""
    start, end = named.get("from", start), named.get("to", end)
    if start > end:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={start:g} > to={end:g}")


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


@refuses("amax", "amin", "aminmax")
def extremes(_: str, self: Tensor, dim: Any = (), keepdim: bool = False, *, out: Tensor | None = None,
             min: Tensor | None = None, max: Tensor | None = None) -> None:
    """aten/src/ATen/native/ReduceOpsUtils.h, zero_numel_check_dims; ReduceAllOps.cpp and ReduceOps.cpp, aminmax."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if self.numel() == 0:
        for d in dims:
            if self.dim() == 0 or self.shape[wrap_dim(d, self.dim())] == 0:
                raise IndexError(f"Expected reduction dim {d} to have non-zero size.")
    for given in (min, max):
        if given is not None and given.dtype != self.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {name_dtype(self.dtype)}, but got "
                               f"{name_dtype(given.dtype)} instead")


@refuses("roll")
def roll(_: str, self: Tensor, shifts: Any, dims: Any = (), **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorTransformations.h, roll_common; a tensor without elements is cloned before."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if self.numel() == 0:
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


@refuses("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell")
def fused_cell(_: str, input_gates: Tensor, hidden_gates: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cuda/RNN.cu, checkSizes."""
    if input_gates.shape != hidden_gates.shape:
        raise RuntimeError("Expected tensor for argument #1 'input_gates' to have same size as tensor for argument #2 "
                           f"'hidden_gates'; but {list(input_gates.shape)} does not equal {list(hidden_gates.shape)}")
