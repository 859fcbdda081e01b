"""Counts of classes without data, as routers make them: ``bincount``, and ``one_hot``, whose sums count."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, host_kernel, new_on_device_of
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
    return _scatter_ones(self, num_classes, _count_on_device)


@host_kernel("one_hot")
def _one_hot_on_host(self: torch.Tensor, num_classes: int = -1) -> Any:
    """The same source: the CPU looks for the smallest and the largest class first."""
    return _scatter_ones(self, num_classes, _count_on_host)


def _count_on_device(self: torch.Tensor, num_classes: int) -> int:
    return int(aten.max.default(self).item()) + 1 if num_classes == -1 else num_classes


def _count_on_host(self: torch.Tensor, num_classes: int) -> int:
    """The given number, or what the largest class says. Raises RuntimeError for known classes that cannot be."""
    least, most = aten.aminmax.default(self)
    if num_classes == -1:
        num_classes = int(most.item()) + 1
    low, high = read_known(least), read_known(most)
    if low is not None and high is not None and not 0 <= int(low) <= int(high) < num_classes:
        raise RuntimeError(f"one_hot: classes from {int(low)} to {int(high)} are not all in [0, {num_classes})")
    return num_classes


def _scatter_ones(self: torch.Tensor, num_classes: int, count: Callable[[torch.Tensor, int], int]) -> Any:
    """The result, of as many classes as ``count`` says; another dtype is left to torch, which refuses it."""
    if self.dtype is not torch.int64:
        return NotImplemented
    if num_classes < -1 or num_classes == 0 or num_classes == -1 and not self.numel():
        raise RuntimeError(f"one_hot: num_classes={num_classes} for {list(self.shape)}, where at least 1 is needed")
    if not self.numel():
        return new_on_device_of(self, aten.empty.memory_format, [*self.shape, num_classes], dtype=torch.int64)
    num_classes = count(self, num_classes)
    zeros = new_on_device_of(self, aten.zeros.default, [*self.shape, num_classes], dtype=torch.int64)
    out: torch.Tensor = aten.scatter_.value(zeros, -1, self.unsqueeze(-1), 1)
    if read_known(out) is None:
        storage = out.untyped_storage()
        assert isinstance(storage, MetaStorage)
        storage.density = 1 / num_classes  # every class as likely as the others
    return out
