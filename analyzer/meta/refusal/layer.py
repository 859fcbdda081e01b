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
    is_3d = transposed and weight.dim() == 5  # NaiveConvolutionTranspose3d.cpp reads its bias in the input's dtype
    _check_dtypes(device_type, input, weight, bias, (transposed or any(d > 1 for d in dilation)) and not is_3d)
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
    # cuDNN has none, cuda/ConvolutionMM2d.cu is for floats; the CPU's kernels are for int64, too, and the plain one for
    # all integers
    is_plain = not transposed and all(d == 1 for d in dilation) and input.dtype != torch.bool
    if is_integral(input) and not (device_type == "cpu" and (is_plain or input.dtype == torch.int64)):
        raise NotImplementedError(f'"slow_conv2d_{device_type}" not implemented for \'{name_dtype(input.dtype)}\'')
    if transposed:
        _check_output_padding(stride, dilation, output_padding, weight.dim() - 2)


def _check_dtypes(device_type: str, input: Tensor, weight: Tensor, bias: Tensor | None, is_added: bool) -> None:
    """aten/src/ATen/native/Convolution.cpp, check_input_same_type_as_parameters. The CPU's own kernels of transposed
    and dilated convolutions, which bfloat16 does not take, add a bias of any dtype.
    """
    if input.dtype != weight.dtype:
        raise RuntimeError(f"Input type ({name_dtype(input.dtype)}) and weight type ({name_dtype(weight.dtype)}) "
                           "should be the same")
    is_added = is_added and device_type == "cpu" and input.dtype.is_floating_point and input.dtype != torch.bfloat16
    if bias is not None and bias.dtype != input.dtype and not is_added:
        raise RuntimeError(f"Input type ({name_dtype(input.dtype)}) and bias type ({name_dtype(bias.dtype)}) should "
                           "be the same")


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
    classes = self.shape[1 if self.dim() > 1 else 0]
    if weight is not None and weight.numel() != classes:
        raise RuntimeError("weight tensor should be defined either for all or no classes")
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


@refuses("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell")
def fused_cell(_: str, input_gates: Tensor, hidden_gates: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/cuda/RNN.cu, checkSizes."""
    if input_gates.shape != hidden_gates.shape:
        raise RuntimeError("Expected tensor for argument #1 'input_gates' to have same size as tensor for argument #2 "
                           f"'hidden_gates'; but {list(input_gates.shape)} does not equal {list(hidden_gates.shape)}")


@refuses("mkldnn_rnn_layer")
def recurrent_layer(_: str, input: Tensor, weight0: Tensor, weight1: Tensor, weight2: Tensor, weight3: Tensor,
                    *states: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/mkldnn/RNN.cpp: oneDNN has dtypes of its own, and no layer whose state has another one."""
    for state in states[:2]:
        if state.dtype not in _ONEDNN_DTYPES:
            raise RuntimeError("get_mkldnn_dtype: unsupported data type")
        if state.dtype != input.dtype:
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive: "
                               f"a state is {name_dtype(state.dtype)} and the input {name_dtype(input.dtype)}")


_ONEDNN_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32))


@refuses("_cudnn_rnn")
def cudnn_rnn(_: str, input: Tensor, weight: Sequence[Tensor], weight_stride0: int, weight_buf: Tensor | None,
              hx: Tensor, cx: Tensor | None, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/RNN.h, check_attributes, as cudnn/RNN.cpp calls it."""
    for name, tensors in (("hidden", (hx, cx)), ("parameter", weight)):
        for t in tensors:
            if t is not None and t.dtype != input.dtype:
                raise RuntimeError(f"Input and {name} tensors are not the same dtype, found input tensor with "
                                   f"{name_dtype(input.dtype)} and {name} tensor with {name_dtype(t.dtype)}")


@refuses("native_group_norm")
def group_norm(device_type: str, input: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int,
               *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/group_norm.cpp, check_group_norm_inputs, and the dtypes of other norms."""
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and tuple(given.shape) != (channels,):
            raise RuntimeError(f"Expected {name} to be a vector of size equal to the number of channels in input, but "
                               f"got {name} of shape {list(given.shape)} and input of shape {list(input.shape)}")
    norm(device_type, input, weight, bias)


@refuses("native_batch_norm")
def batch_norm(device_type: str, input: Tensor, weight: Tensor | None, bias: Tensor | None,
               running_mean: Tensor | None, running_var: Tensor | None, training: bool, *_args: Any,
               **_kwargs: Any) -> None:
    """aten/src/ATen/native/Normalization.cpp, batch_norm_cpu, and cuda/Normalization.cu, batch_norm_cuda_out; and what
    `torch.batch_norm` checks before (_batch_norm_impl_index): a kernel reads and writes beyond what it is given.
    """
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if running_mean is None and not training:
        raise RuntimeError("running_mean must be defined in evaluation mode")
    channels = input.shape[1] if input.dim() > 1 else 0
    given = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    for name, t in given.items():
        if t is not None and t.numel() < channels:
            raise RuntimeError(f"{name} should contain {channels} elements not {t.numel()}")
    norm(device_type, input, weight, bias, running_mean, running_var)


@refuses("_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
def norm(device_type: str, input: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any,
         **_kwargs: Any) -> None:
    """aten/src/ATen/native/mixed_data_type.h; cuda/Normalization.cu, batch_norm_cuda_out, and group_norm_kernel.cu.
    Running statistics stand after the bias.
    """
    given = [t for t in (weight, bias, *args[:2]) if isinstance(t, Tensor)]
    flat = next((t for t in args[:2] if isinstance(t, Tensor) and t.dim() != 1), None)
    if flat is not None:
        raise RuntimeError(f"TensorAccessor expected 1 dims but tensor has {flat.dim()}")
    if not input.numel() or all(t.dtype == input.dtype for t in given):
        return
    is_low = input.dtype in (torch.float16, torch.bfloat16)
    if not is_low or any(t.dtype != torch.float32 for t in given):
        other = next(t.dtype for t in given if t.dtype != input.dtype)
        raise RuntimeError(f"expected scalar type {name_dtype(input.dtype)} but found {name_dtype(other)}")


@refuses("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(_: str, grad_output: Tensor, output: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/SoftMax.cpp, the meta function of softmax_backward_data: checkSameSize."""
    if grad_output.shape != output.shape:
        raise RuntimeError("Expected tensor for argument #1 'grad' to have same size as tensor for argument #2 "
                           f"'output'; but {list(grad_output.shape)} does not equal {list(output.shape)}")


@refuses("soft_margin_loss")
def soft_margin_loss(_: str, self: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Loss.cpp, soft_margin_loss_out, which works in a tensor of the input's shape."""
    loss_in_the_dtype_of_its_input(_, self, target)
    shape = torch.broadcast_shapes(self.shape, target.shape)
    if shape != self.shape:
        raise RuntimeError(f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(shape)}")


@refuses("huber_loss")
def loss_in_the_dtype_of_its_input(_: str, self: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Loss.cpp, soft_margin_loss_out and huber_loss_out: the result has the dtype of the input."""
    result = torch.promote_types(torch.promote_types(self.dtype, target.dtype), torch.float32) if (
        is_integral(self) and is_integral(target)) else torch.promote_types(self.dtype, target.dtype)
    if not torch.can_cast(result, self.dtype):
        raise RuntimeError(f"result type {name_dtype(result)} can't be cast to the desired output type "
                           f"{name_dtype(self.dtype)}")


@refuses("smooth_l1_loss")
def smooth_l1_loss(_: str, self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> None:
    """aten/src/ATen/native/BinaryOps.cpp, the meta function of smooth_l1_loss."""
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")


@refuses("celu", "celu_")
def celu(_: str, self: Tensor, alpha: float = 1.0) -> None:
    """aten/src/ATen/native/Activation.cpp, celu."""
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")


@refuses("native_layer_norm")
def layer_norm(device_type: str, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None,
               bias: Tensor | None, *_args: Any, **_kwargs: Any) -> None:
    """The same on the CPU; aten/src/ATen/native/cuda/layer_norm_kernel.cu reads parameters in the input's dtype."""
    norm(device_type, input, weight, bias)
    other = next((t for t in (weight, bias) if t is not None and t.dtype != input.dtype), None)
    if device_type == "cuda" and other is not None and input.numel():
        raise RuntimeError(f"expected scalar type {name_dtype(input.dtype)} but found {name_dtype(other.dtype)}")


@refuses("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(_: str, self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor,
                        **_kwargs: Any) -> None:
    """aten/src/ATen/native/FractionalMaxPooling.h, fractional_max_pool_check_shape."""
    if random_samples.dtype != self.dtype:
        raise RuntimeError("Expect _random_samples to have the same dtype as input")


@refuses("max_pool2d_with_indices")
def max_pool2d(_: str, self: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Pool.h, pool2d_shape_check."""
    if self.dim() not in (3, 4):
        raise RuntimeError("non-empty 3D or 4D (batch mode) tensor expected for input, but got "
                           f"{list(self.shape)}")


@refuses("upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_bilinear2d",
         "upsample_bicubic2d", "upsample_nearest2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
         "_upsample_bicubic2d_aa", "upsample_trilinear3d", "upsample_nearest3d", "_upsample_nearest_exact3d")
def upsample(_: str, self: Tensor, output_size: Sequence[int], *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/UpSample.h, upsample_2d_common_check, and those of one and three dimensions."""
    if min(*self.shape[2:], *output_size) <= 0:
        raise RuntimeError(f"Input and output sizes should be greater than 0, but got input {list(self.shape[2:])} "
                           f"output {list(output_size)}")


@refuses("binary_cross_entropy_with_logits")
def cross_entropy_of_logits(device_type: str, self: Tensor, target: Tensor, weight: Tensor | None = None,
                            pos_weight: Tensor | None = None, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Loss.cpp, which takes log_sigmoid of the input and multiplies by weights in place."""
    if self.numel() and not self.dtype.is_floating_point:
        raise NotImplementedError(f'"log_sigmoid_{device_type}" not implemented for \'{name_dtype(self.dtype)}\'')
    for given in (weight, pos_weight):
        shape = list(self.shape)
        if given is not None and list(wider := torch.broadcast_shapes(self.shape, given.shape)) != shape:
            raise RuntimeError(f"output with shape {shape} doesn't match the broadcast shape {list(wider)}")


@refuses("embedding_renorm_")
def embedding_renorm(_: str, self: Tensor, indices: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Embedding.cpp, embedding_renorm_cpu_, which takes norms of rows."""
    if is_integral(self) and indices.numel():
        raise RuntimeError("norm(): input dtype should be either floating point or complex. Got "
                           f"{name_dtype(self.dtype)} instead.")


@refuses("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(_: str, weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any,
                  per_sample_weights: Tensor | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/EmbeddingBag.cpp, check_arguments."""
    given = args[3] if len(args) > 3 else per_sample_weights
    if given is not None and given.dtype != weight.dtype:
        raise RuntimeError("Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 "
                           f"'per_sample_weights'; but type {name_dtype(weight.dtype)} does not equal "
                           f"{name_dtype(given.dtype)} (while checking arguments for embedding_bag)")


@refuses("_ctc_loss")
def ctc_loss(_: str, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
             *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/LossCTC.cpp, ctc_loss_tensor."""
    check_lengths(input_lengths, target_lengths)


def check_lengths(input_lengths: Any, target_lengths: Any) -> None:
    """Raise RuntimeError for lengths of sequences in tensors that hold no whole numbers."""
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if isinstance(lengths, Tensor) and (not is_integral(lengths) or lengths.dtype is torch.bool):
            raise RuntimeError(f"{name} must be integral")


@refuses("_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy(_: str, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None,
                         weight: Tensor | None, *_args: Any, **_kwargs: Any) -> None:
    """torch/nn/modules/linear_cross_entropy.py: products of chunks, and labels and their weights by index."""
    if linear_weight.dtype != torch.promote_types(input.dtype, linear_weight.dtype):  # the input is cast to it
        raise RuntimeError("expected m1 and m2 to have the same dtype, but got: "
                           f"{name_dtype(input.dtype)} != {name_dtype(linear_weight.dtype)}")
    if input.dim() != 2:
        raise RuntimeError(f"mat1 must be a matrix, got {input.dim()}-D tensor")
    if target.dim() != 1:
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    if weight is not None and not weight.dim():
        raise IndexError("index out of range in self")
