"""``one_hot`` on CUDA: zeros with ones scattered in, where meta compares with an enumeration. Source:
``aten/src/ATen/native/Onehot.cpp``. On CUDA nothing is checked on the host when ``num_classes`` is given.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.function import new_on_device_of
from analyzer.cuda.kernel_registry import device_kernel
from analyzer.meta.storage import MetaStorage
from analyzer.meta.value.contents import read_known

aten = torch.ops.aten


@device_kernel("one_hot")
def _one_hot(self: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes <= 0 or self.dtype is not torch.int64 or not self.numel() or read_known(self) is not None:
        return NotImplemented  # classes that are known stay so by comparison
    zeros = new_on_device_of(self, aten.zeros.default, [*self.shape, num_classes], dtype=torch.int64)
    out = aten.scatter_.value(zeros, -1, self.unsqueeze(-1), 1)
    storage = out.untyped_storage()
    assert isinstance(storage, MetaStorage)
    storage.density = 1 / num_classes  # every class as likely as the others
    return out
