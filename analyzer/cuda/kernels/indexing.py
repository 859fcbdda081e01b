"""Indices, counts and packed sequences, whose kernels read contents."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, new_on_device_of
from analyzer.errors import DataDependentError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.function.mode import constant
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.simulated_device import any_on
from analyzer.meta.state import CPU, active_state
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.expectation import count_evenly

# Indices whose values are known and that point outside raise as they do on the CPU; a GPU ends with an assertion.

Tensor = torch.Tensor


def _first_outside(index: Tensor, size: int) -> int | None:
    """The first value of ``index`` that is not in [0, size), None where there is none or contents are unknown."""
    values = read_known(index) if index.dtype in (torch.int32, torch.int64) else None
    if values is None or not values.numel():
        return None
    with without_modes():
        outside = values[(values < 0) | (values >= size)]
        return int(outside[0]) if outside.numel() else None


@device_kernel("embedding", on_any_device=True)
def embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    """``aten/src/ATen/native/Embedding.cpp``, by index_select. Raises IndexError."""
    return index_select(weight, 0, indices)


@device_kernel("index_select", on_any_device=True)
def index_select(self: Tensor, dim: int, index: Tensor) -> Any:
    """``aten/src/ATen/native/TensorAdvancedIndexing.cpp``. Raises IndexError."""
    if self.dim() and _first_outside(index, self.shape[dim]) is not None:
        raise IndexError("index out of range in self")
    return NotImplemented


@device_kernel("gather", on_any_device=True)
def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``aten/src/ATen/native/cpu/ScatterGatherKernel.cpp``. Raises RuntimeError."""
    size = self.shape[dim] if self.dim() else 1
    if (value := _first_outside(index, size)) is not None:
        raise RuntimeError(f"index {value} is out of bounds for dimension {dim % max(1, self.dim())} with size {size}")
    return NotImplemented


# Counts of classes without data, as routers make them: ``bincount``, and ``one_hot``, whose sums count.

aten = torch.ops.aten


@device_kernel("bincount", on_any_device=True)
def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """As many bins as the caller asked for at least."""
    if minlength <= 0 or read_known(self) is not None:
        return NotImplemented
    state = active_state()
    state.assume(f"bincount: all values are taken to be below minlength={minlength}")
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    out = aten.new_empty.default(self, [minlength], dtype=dtype)
    if weights is None:
        count_evenly(state, "bincount", out, self.numel())
    return out


@device_kernel("one_hot", on_any_device=True)
def _one_hot(self: torch.Tensor, num_classes: int = -1) -> Any:
    """``aten/src/ATen/native/Onehot.cpp``: zeros with ones scattered in, where meta compares with an enumeration. A CPU
    looks for the smallest and the largest class first; on CUDA nothing is checked where ``num_classes`` is given.
    """
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
        storage.density = 1 / num_classes  # every class as likely as the others
    return out


# Packed sequences: torch's code reads lengths through raw pointers, which tensors without data do not have. Source:
# ``aten/src/ATen/native/PackedSequence.cpp``. Lengths must be known: a tensor made from Python numbers is.

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
