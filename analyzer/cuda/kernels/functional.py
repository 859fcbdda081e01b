"""Functions, losses, indices, in-place code and optimizers that run otherwise on the device than on meta."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape, new_on_device_of, overloads
from analyzer.errors import DataDependentError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.function.mode import constant
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.refusal.rule import expands, name_dtype
from analyzer.meta.simulated_device import any_on
from analyzer.meta.state import CPU, active_state
from analyzer.meta.tensor import name_of_node, with_node
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.expectation import bins_left_out, count_classes, share_of_marks
from analyzer.meta.value.sample import count_sample, is_told_by_sample

Tensor = torch.Tensor
aten = torch.ops.aten


@device_kernel("dropout")
def _drop_out(input: Tensor, p: float, train: bool) -> Any:
    """``aten/src/ATen/native/Dropout.cpp``, is_fused_kernel_acceptable: one kernel that saves a boolean mask."""
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout.default(input, p, True)[0]
    return NotImplemented


@device_kernel("max_pool1d", on_any_device=True)
def _pool_maxima(self: Tensor, *_args: Any) -> Any:
    """``aten/src/ATen/native/MaxPooling.cpp``, max_pool1d_impl, where no gradient is asked for, as of integers."""
    if self.numel() and not self.dtype.is_floating_point:
        raise NotImplementedError(f'"max_pool1d_impl" not implemented for \'{name_dtype(self.dtype)}\'')
    return NotImplemented


@device_kernel("addbmm_", on_any_device=True)
def _add_products(self: Tensor, batch1: Tensor, batch2: Tensor, **_named: Any) -> Any:
    """``aten/src/ATen/native/LinearAlgebra.cpp``, addbmm_impl_: what is written is resized to the product's shape."""
    shape = (*batch1.shape[1:2], *batch2.shape[2:])
    if batch1.dim() == batch2.dim() == 3 and self.shape != shape and expands(self.shape, shape):
        self.resize_(shape)
    return NotImplemented


def _softmax(kernel: torch._ops.OpOverload, self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """``aten/src/ATen/native/SoftMax.cpp``: halves become float32 in the kernel; bfloat16 has no such path."""
    return kernel(self, dim, True) if self.dtype is torch.float16 and dtype is torch.float32 else NotImplemented


device_kernel("softmax.int")(partial(_softmax, aten._softmax.default))
device_kernel("log_softmax.int")(partial(_softmax, aten._log_softmax.default))


def _activation_backward(kernel: torch._ops.OpOverload, grad_output: Tensor, self: Tensor) -> Any:
    """One kernel, where meta composes eight operators."""
    return NotImplemented if torch.is_grad_enabled() else call_whole(kernel, grad_output, self)


device_kernel("silu_backward", on_any_device=True)(partial(_activation_backward, aten.silu_backward.default))
device_kernel("mish_backward", on_any_device=True)(partial(_activation_backward, aten.mish_backward.default))


# aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu recomputes what the CPU keeps in the buffer
device_shape("log_sigmoid_forward")(lambda self: (torch.empty_like(self), self.new_empty(0)))


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


@device_shape("multilabel_margin_loss_forward", on_any_device=True)
def shape_multilabel_margin(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu: the loss, and which classes are targets."""
    return self.new_empty(self.shape[:1] if reduction == 0 and self.dim() == 2 else ()), self.new_empty(target.shape)


# Where C++ code works in place on CUDA: before it overwrites a temporary, ATen asks ``areAnyTensorSubclassLike``
# (``aten/src/ATen/TensorSubclassLikeUtils.h``), which is true of meta tensors and under any dispatch mode.

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
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    zeros = new_on_device_of(grad, aten.zeros.default, list(sizes), dtype=grad.dtype)
    return aten.scatter_.src(zeros, dim, indices, grad)


@device_kernel("index_put", on_any_device=True)
def index_put(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``index_backward`` adds into the zeros that were made for it; a user's own call makes a copy on CUDA too."""
    node = torch._C._current_autograd_node()
    if node is None or not accumulate or torch.is_grad_enabled() or not name_of_node(node).startswith("IndexBackward"):
        return NotImplemented
    return aten._index_put_impl_.default(self, indices, values, True, True)


@device_kernel("linear", on_any_device=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """aten/src/ATen/native/Linear.cpp: an input that is not flattened to a matrix gets its bias after the product."""
    if bias is None or input.dim() <= 2 or input.is_contiguous() or weight.dim() != 2:
        return NotImplemented
    return aten.add_.Tensor(aten.matmul.default(input, aten.t.default(weight)), bias)


@device_kernel("_amp_foreach_non_finite_check_and_unscale_", on_any_device=True)
def _check_and_unscale(self: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    storage = found_inf.untyped_storage()
    assert isinstance(storage, MetaStorage)
    before = storage.known  # what GradScaler filled it with: zero
    call_whole(aten._amp_foreach_non_finite_check_and_unscale_.default, self, found_inf, inv_scale)
    storage.known = before
    active_state().assume("gradients are assumed to be finite: GradScaler skips no step")


@device_shape("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
              "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr")
def shape_fused_update(*_: Any, **__: Any) -> None:
    """aten/src/ATen/native/cuda/FusedSgdKernel.cu and its like: written in place, without memory of their own."""


@device_kernel("bincount", on_any_device=True)
def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    if minlength <= 0 or read_known(self) is not None:
        return NotImplemented
    state = active_state()
    state.assume(f"bincount: all values are assumed to be below minlength={minlength}")
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    out = aten.new_empty.default(self, [minlength], dtype=dtype)
    if weights is None:
        if is_told_by_sample(self.untyped_storage()):
            out.untyped_storage().sample = count_sample(self, minlength)
        else:
            count_classes(state, "bincount", out, self.numel(), bins_left_out(self, minlength))
    return out


@device_kernel("one_hot", on_any_device=True)
def _one_hot(self: torch.Tensor, num_classes: int = -1) -> Any:
    """``aten/src/ATen/native/Onehot.cpp``: zeros with ones scattered in; a CPU looks first whether all classes fit."""
    if self.dtype is not torch.int64:
        return NotImplemented  # torch refuses it
    if num_classes < -1 or num_classes == 0 or num_classes == -1 and not self.numel():
        raise RuntimeError(f"one_hot: num_classes={num_classes} for {list(self.shape)}, where at least 1 is needed")
    if not self.numel():
        return new_on_device_of(self, aten.empty.memory_format, [*self.shape, num_classes], dtype=torch.int64)
    if not any_on(active_state(), "cuda", [self]):
        least, most = aten.aminmax.default(self)
        if num_classes == -1:
            num_classes = int(most.item()) + 1
        low, high = read_known(least), read_known(most)
        if low is not None and high is not None and not 0 <= int(low) <= int(high) < num_classes:
            raise RuntimeError(f"one_hot: classes from {int(low)} to {int(high)} are not all in [0, {num_classes})")
        del least, most  # the kernel frees both before it makes the zeros
    elif num_classes == -1:
        num_classes = int(aten.max.default(self).item()) + 1
    zeros = new_on_device_of(self, aten.zeros.default, [*self.shape, num_classes], dtype=torch.int64)
    out: torch.Tensor = aten.scatter_.value(zeros, -1, self.unsqueeze(-1), 1)
    if read_known(out) is None:
        storage = out.untyped_storage()
        assert isinstance(storage, MetaStorage)
        storage.density = share_of_marks(self.untyped_storage(), num_classes)  # every class as likely as the others
    return out


# What the kernels take besides the names that those on meta know: ``aten/src/ATen/native/TensorAdvancedIndexing.cpp``,
# get_operator_enum.
_REDUCTIONS = {"max": "amax", "min": "amin"}


def _scatter_reduce(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, op: torch._ops.OpOverload,
                    **named: Any) -> Any:
    return op(self, dim, index, src, _REDUCTIONS.get(reduce, reduce), **named)


for _name in ("scatter_reduce.two", "scatter_reduce.two_out", "scatter_reduce_.two"):
    device_shape(_name, on_any_device=True)(partial(_scatter_reduce, op=overloads(_name)[0]))


# Packed sequences, whose lengths must be known: ``aten/src/ATen/native/PackedSequence.cpp`` reads them by raw pointers.

def read_lengths(operator: str, lengths: Tensor) -> list[int]:
    """The values of ``lengths``. Raises DataDependentError where they are not known."""
    value = read_known(lengths)
    if value is None:
        raise DataDependentError(
            f"{operator} needs the lengths of the sequences, which are not known. {active_state().where()}\n"
            "Way out: pass lengths made from Python numbers, torch.tensor([...]).")
    return [int(n) for n in value.tolist()]


def _on_host(values: list[int]) -> Tensor:
    with without_modes():
        value = torch.tensor(values, dtype=torch.int64)
    return constant(active_state(), value, CPU)


@with_node("PackPaddedSequenceBackward0")
class PackPadded(torch.autograd.Function):
    """``aten::_pack_padded_sequence``: of each time step the sequences that are long enough, one after the other."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, batch_sizes: list[int], batch_first: bool) -> Tensor:
        ctx.call = (input.shape, batch_sizes, batch_first)
        time_first = input.transpose(0, 1) if batch_first else input
        return torch.cat([time_first[step, :size] for step, size in enumerate(batch_sizes)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, batch_sizes, batch_first = ctx.call
        grad = grads[0].new_zeros((shape[1], shape[0], *shape[2:]) if batch_first else shape)
        start = 0
        for step, size in enumerate(batch_sizes):
            grad[step, :size].copy_(grads[0][start:start + size])
            start += size
        return grad.transpose(0, 1) if batch_first else grad, None, None


@device_kernel("_pack_padded_sequence", on_any_device=True)
def _pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    wanted = read_lengths("pack_padded_sequence", lengths)
    if not wanted or min(wanted) <= 0 or sorted(wanted, reverse=True) != wanted:
        raise RuntimeError(f"pack_padded_sequence: lengths {wanted} must be positive and in decreasing order; "
                           "pass enforce_sorted=False to have them sorted")
    batch_sizes = [sum(n > step for n in wanted) for step in range(wanted[0])]
    return PackPadded.apply(input, batch_sizes, batch_first), _on_host(batch_sizes)


@device_kernel("_pad_packed_sequence", on_any_device=True)
def _pad_packed_sequence(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float,
                         total_length: int) -> tuple[Tensor, Tensor]:
    sizes = read_lengths("pad_packed_sequence", batch_sizes)
    length = max(len(sizes), total_length)
    out = data.new_full((length, sizes[0], *data.shape[1:]), padding_value)
    start = first = 0
    for step, size in enumerate(sizes):  # one copy per run of equal batch sizes, as there
        if step + 1 == len(sizes) or sizes[step + 1] != size:
            count = (step + 1 - first) * size
            out[first:step + 1, :size].copy_(data[start:start + count].view(step + 1 - first, size, *data.shape[1:]))
            start, first = start + count, step + 1
    lengths = [sum(size > i for size in sizes) for i in range(sizes[0])]
    return out.transpose(0, 1) if batch_first else out, _on_host(lengths)
