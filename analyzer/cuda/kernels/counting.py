"""Counts of classes without data, as routers make them: ``bincount``, and ``one_hot``, whose sums count."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, new_on_device_of
from analyzer.meta.state import active_state
from analyzer.meta.storage import MetaStorage
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.expectation import count_evenly

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


@device_kernel("one_hot")
def _one_hot(self: torch.Tensor, num_classes: int = -1) -> Any:
    """``aten/src/ATen/native/Onehot.cpp``: zeros with ones scattered in, where meta compares with an enumeration. On
    CUDA nothing is checked on the host when ``num_classes`` is given.
    """
    if num_classes <= 0 or self.dtype is not torch.int64 or not self.numel() or read_known(self) is not None:
        return NotImplemented  # classes that are known stay so by comparison
    zeros = new_on_device_of(self, aten.zeros.default, [*self.shape, num_classes], dtype=torch.int64)
    out = aten.scatter_.value(zeros, -1, self.unsqueeze(-1), 1)
    storage = out.untyped_storage()
    assert isinstance(storage, MetaStorage)
    storage.density = 1 / num_classes  # every class as likely as the others
    return out
