"""Optimizers without data: fused steps, of which torch has kernels on meta for Adam and AdamW with a plain rate alone,
and ``torch.amp.GradScaler``, whose gradients are taken to be finite, so that no step is skipped.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape
from analyzer.meta.state import current
from analyzer.meta.storage import MetaStorage

aten = torch.ops.aten


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
