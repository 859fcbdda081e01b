"""Packed sequences: torch's code reads lengths through raw pointers, which tensors without data do not have. Source:
``aten/src/ATen/native/PackedSequence.cpp``. Lengths must be known: a tensor made from Python numbers is.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel
from analyzer.errors import DataDependentError
from analyzer.meta.function.creation import constant
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import CPU, active_state
from analyzer.meta.value.contents import read_known

Tensor = torch.Tensor
aten = torch.ops.aten


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
        """Run the kernel and keep what its backward pass needs."""
        ctx.call = (input.shape, batch_sizes, batch_first)
        time_first = input.transpose(0, 1) if batch_first else input
        return torch.cat([time_first[step, :size] for step, size in enumerate(batch_sizes)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the inputs."""
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
