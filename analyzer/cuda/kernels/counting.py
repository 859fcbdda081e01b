"""``bincount`` without data: as many bins as the caller asked for at least."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import active_state
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.density import balanced_counts
from analyzer.meta.value.known_value import Deferred

aten = torch.ops.aten


@device_kernel("bincount", on_any_device=True)
def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    if minlength <= 0 or read_known(self) is not None:
        return NotImplemented
    state = active_state()
    state.assume(f"bincount: all values are taken to be below minlength={minlength}")
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    out = aten.new_empty.default(self, [minlength], dtype=dtype)
    if weights is None and (state.options.unknown_size == "balanced" or state.repeats) and state.expects_contents:
        state.assume(
            f"bincount: unknown elements are taken to fall evenly into {minlength} bins (balanced) {state.where()}")
        only = state.placeholder if state.repeats else None
        with without_modes():
            out.untyped_storage().known = Deferred(torch.tensor(balanced_counts(self.numel(), minlength, only)))
    return out
