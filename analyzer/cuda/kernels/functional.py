"""Functions, losses, in-place code, optimizers and random draws that run otherwise on the device than on meta."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape, new_on_device_of
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.function.answer import move
from analyzer.meta.state import active_state, current
from analyzer.meta.tensor import device_of

# Functions of ``torch.nn.functional`` that CUDA, and the CPU in part, runs by other kernels than meta does.

Tensor = torch.Tensor
aten = torch.ops.aten


@device_kernel("dropout")
def _drop_out(input: Tensor, p: float, train: bool) -> Any:
    """``aten/src/ATen/native/Dropout.cpp``, is_fused_kernel_acceptable: one kernel that saves a boolean mask, where
    meta (and the CPU) multiply by a noise tensor. The in-place variant and those of features and alpha run the same on
    both.
    """
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout.default(input, p, True)[0]
    return NotImplemented


def _softmax(kernel: torch._ops.OpOverload, self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """``aten/src/ATen/native/SoftMax.cpp``: halves become float32 in one kernel, where elsewhere the input is converted
    first; bfloat16 has no such path.
    """
    return kernel(self, dim, True) if self.dtype is torch.float16 and dtype is torch.float32 else NotImplemented


device_kernel("softmax.int")(partial(_softmax, aten._softmax.default))
device_kernel("log_softmax.int")(partial(_softmax, aten._log_softmax.default))


def _activation_backward(kernel: torch._ops.OpOverload, grad_output: Tensor, self: Tensor) -> Any:
    """One kernel, where meta composes eight operators."""
    return NotImplemented if torch.is_grad_enabled() else call_whole(kernel, grad_output, self)


device_kernel("silu_backward", on_any_device=True)(partial(_activation_backward, aten.silu_backward.default))
device_kernel("mish_backward", on_any_device=True)(partial(_activation_backward, aten.mish_backward.default))


@device_shape("log_sigmoid_forward")
def _log_sigmoid_shape(self: Tensor) -> tuple[Tensor, Tensor]:
    """``aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu`` recomputes what the CPU keeps in the buffer."""
    return torch.empty_like(self), self.new_empty(0)


# Losses whose kernels return other storages than meta's, or cannot run there. Connectionist temporal classification
# cannot where its lengths are tensors; source: ``ctc_loss_gpu_template`` in ``aten/src/ATen/native/cuda/LossCTC.cu``.

@device_kernel("ctc_loss.Tensor")
def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *args: Any) -> Any:
    """``aten/src/ATen/native/LossCTC.cpp``: lengths are read on the host, and the kernel gets copies."""
    lengths = [move(active_state(), t, device_of(log_probs)) for t in (input_lengths, target_lengths)]
    if lengths[0] is input_lengths and lengths[1] is target_lengths:
        return NotImplemented
    return torch.ops.aten.ctc_loss.Tensor(log_probs, targets, *lengths, *args)


@device_shape("_ctc_loss.Tensor")
def ctc_loss_shape(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *args: Any,
                   **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The loss of each sequence and the logarithms of alpha; targets are taken to be as long as their tensor allows."""
    steps, batch = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


@device_shape("mse_loss", "smooth_l1_loss", "soft_margin_loss", on_any_device=True)
def elementwise_loss_shape(self: Tensor, target: Tensor, reduction: int = 1, *_: Any, **__: Any) -> Tensor:
    """The loss of each element; a mean or sum is written into the first of them, and the storage keeps its size.
    BinaryOps.cpp (TORCH_META_FUNC of mse_loss and smooth_l1_loss) and Loss.cpp (soft_margin_loss_out).
    """
    out = self + target  # the layout that TensorIterator gives
    return out.resize_(()) if reduction else out


@device_shape("binary_cross_entropy", on_any_device=True)
def binary_cross_entropy_shape(self: Tensor, target: Tensor, weight: Tensor | None = None,
                               reduction: int = 1) -> Tensor:
    """The same: Loss.cpp, binary_cross_entropy_out_cpu, and cuda/Loss.cu."""
    out = torch.empty_like(self)
    return out.resize_(()) if reduction else out


def _resized(op: torch._ops.OpOverload, self: Tensor, *args: Any) -> Tensor:
    """``empty_like`` of the input that is resized to the result: a storage never shrinks. Im2Col.cpp, Col2Im.cpp and
    cuda/Im2Col.cu, Col2Im.cu; `kernel_temporary` has what is held where it grows.
    """
    out = op(self, *args)
    return self.new_empty(max(self.numel(), out.numel())).resize_(out.shape)


device_shape("im2col", on_any_device=True)(partial(_resized, aten.im2col.default))
device_shape("col2im", on_any_device=True)(partial(_resized, aten.col2im.default))


@device_shape("multi_margin_loss")
def shape_multi_margin(self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
                       reduction: int = 1) -> Tensor:
    """aten/src/ATen/native/cuda/MultiMarginLoss.cu: one loss per row (0 is no reduction), else a scalar."""
    return self.new_empty(target.shape if reduction == 0 and target.dim() > 0 else ())


@device_shape("multilabel_margin_loss_forward")
def shape_multilabel_margin(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu: the loss, and which classes are targets."""
    return self.new_empty(self.shape[:1] if reduction == 0 and self.dim() == 2 else ()), self.new_empty(target.shape)


# Where C++ code works in place on CUDA but out of place on meta. Before it overwrites a temporary, ATen asks
# ``areAnyTensorSubclassLike`` (``aten/src/ATen/TensorSubclassLikeUtils.h``), which is true of meta tensors and under
# any dispatch mode: the out-of-place form keeps one more tensor alive for a moment.

@device_kernel("gather_backward", on_any_device=True)
def _gather_backward(grad: Tensor, self: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Any:
    if sparse_grad:
        return NotImplemented
    return aten.scatter_add_.default(aten.new_zeros.default(grad, self.shape), dim, index, grad)


@device_kernel("index_select_backward", on_any_device=True)
def _index_select_backward(grad: Tensor, self_sizes: list[int], dim: int, index: Tensor) -> Any:
    return aten.index_add_.default(aten.new_zeros.default(grad, self_sizes, dtype=grad.dtype), dim, index, grad)


@device_kernel("value_selecting_reduction_backward", on_any_device=True)
def value_selecting_reduction_backward(grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool) -> Any:
    """Gradient of ``max(dim)``, ``sort``, ``topk`` and the like."""
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    zeros = new_on_device_of(grad, aten.zeros.default, list(sizes), dtype=grad.dtype)
    return aten.scatter_.src(zeros, dim, indices, grad)


@device_kernel("index_put", on_any_device=True)
def index_put(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``index_backward`` adds into the zeros that were made for it; a user's own call makes a copy on CUDA too."""
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("IndexBackward") or not accumulate or torch.is_grad_enabled():
        return NotImplemented
    return aten._index_put_impl_.default(self, indices, values, True, True)


@device_kernel("linear", on_any_device=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """aten/src/ATen/native/Linear.cpp: an input that is not flattened to a matrix gets its bias after the product."""
    if bias is None or input.dim() <= 2 or input.is_contiguous() or weight.dim() != 2:
        return NotImplemented
    return aten.add_.Tensor(aten.matmul.default(input, aten.t.default(weight)), bias)


# Optimizers without data: fused steps, of which torch has kernels on meta for Adam and AdamW with a plain rate alone,
# and ``torch.amp.GradScaler``, whose gradients are taken to be finite, so that no step is skipped.

@device_kernel("_amp_foreach_non_finite_check_and_unscale_", on_any_device=True)
def _check_and_unscale(self: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    storage, state = found_inf.untyped_storage(), current()
    assert isinstance(storage, MetaStorage) and state is not None
    before = storage.known  # what GradScaler filled it with: zero
    call_whole(aten._amp_foreach_non_finite_check_and_unscale_.default, self, found_inf, inv_scale)
    storage.known = before
    state.assume("gradients are taken to be finite: GradScaler skips no step")


@device_shape("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
              "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr")
def shape_fused_update(*_: Any, **__: Any) -> None:
    """aten/src/ATen/native/cuda/FusedSgdKernel.cu and its like: written in place, without memory of their own."""
