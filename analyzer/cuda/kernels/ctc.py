"""Connectionist temporal classification: which kernel runs, as ``ctc_loss_impl`` of aten/src/ATen/native/LossCTC.cpp
chooses it, and what it gives.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, device_shape, new_on_device_of
from analyzer.meta.argument import own
from analyzer.meta.function.answer import move
from analyzer.meta.function.mode import constant
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.refusal.layer import check_lengths
from analyzer.meta.state import MetaState, active_state
from analyzer.meta.tensor import device_of
from analyzer.meta.value.contents import read_known

Tensor = torch.Tensor
aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # at::Reduction


@device_kernel("ctc_loss.Tensor", "ctc_loss.IntList", on_any_device=True)
def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
              reduction: int = _MEAN, zero_infinity: bool = False) -> Any:
    """Lengths in tensors are read on the host, where they are known; else the kernel gets copies of them."""
    check_lengths(input_lengths, target_lengths)
    state = active_state()
    inputs, labels = _read(state, input_lengths), _read(state, target_lengths)
    if inputs is None or labels is None:
        return _with_tensors(state, log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    if _uses_cudnn(batched, targets, inputs, labels, blank):
        state.assume("ctc_loss runs in cuDNN, whose workspace is not counted")
        losses = aten._cudnn_ctc_loss.default(batched, targets, inputs, labels, blank, True, zero_infinity)[0]
    else:
        targets = move(state, targets, device_of(batched), torch.int64)
        losses = aten._ctc_loss.default(batched, targets, inputs, labels, blank, zero_infinity)[0]
        if zero_infinity:
            zero = new_on_device_of(losses, aten.zeros.default, [], dtype=losses.dtype)
            losses = aten.where.self(aten.eq.Scalar(losses, math.inf), zero, losses)
    if reduction == _MEAN:
        counts = constant(state, torch.tensor(labels, dtype=losses.dtype), device_of(losses))
        return aten.mean.default(aten.div.Tensor(losses, aten.clamp_min.default(counts, 1)))
    return aten.sum.default(losses) if reduction == _SUM else losses if log_probs.dim() == 3 else losses.squeeze(0)


def _read(state: MetaState, lengths: Any) -> list[int] | None:
    if not isinstance(lengths, Tensor):
        return list(lengths)
    if state.tape is not None or state.graph is not None:  # in which it would be a constant
        return None
    with without_modes():
        known = read_known(own(state, lengths))
        return None if known is None else known.reshape(-1).tolist()


def _with_tensors(state: MetaState, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
                  *options: Any) -> Any:
    if not isinstance(input_lengths, Tensor) or not isinstance(target_lengths, Tensor):
        return NotImplemented
    if state.tape is None:
        longest = _longest(log_probs, targets)
        state.assume(f"ctc_loss: each target is assumed to have {longest} labels, as lengths are not known "
                     f"{state.where()}")
    lengths = [move(state, t, device_of(log_probs)) for t in (input_lengths, target_lengths)]
    if lengths[0] is input_lengths and lengths[1] is target_lengths:
        return NotImplemented
    return aten.ctc_loss.Tensor(log_probs, targets, *lengths, *options)


def _longest(log_probs: Tensor, targets: Tensor) -> int:
    """The labels of the longest target: of a row, or of each where all lie in one row."""
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    return int(targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(batch, 1)))


def _uses_cudnn(log_probs: Tensor, targets: Tensor, inputs: list[int], labels: list[int], blank: int) -> bool:
    """``_use_cudnn_ctc_loss`` of aten/src/ATen/native/cudnn/LossCTC.cpp."""
    return bool(
        torch.backends.cudnn.enabled and blank == 0 and targets.dim() == 1 and log_probs.dtype == torch.float32
        and targets.dtype == torch.int32 and device_of(log_probs).type == "cuda" and device_of(targets).type == "cpu"
        and all(n == log_probs.shape[0] for n in inputs) and all(m < 256 and m <= n for n, m in zip(inputs, labels)))


@device_shape("_ctc_loss.Tensor", on_any_device=True)
def _loss_shape(log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``ctc_loss_allocate_outputs``: two states for each label of the longest target and one more."""
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * _longest(log_probs, targets) + 1)


@device_shape("_ctc_loss_backward", "_ctc_loss_backward.Tensor", on_any_device=True)
def _gradient_shape(grad: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@device_shape("_cudnn_ctc_loss")
def _cudnn_shape(log_probs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of all inputs: aten/src/ATen/native/cudnn/LossCTC.cpp."""
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)
