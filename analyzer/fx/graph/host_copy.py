"""Memory of tensors that waits on the host, and comes back when it is read."""
from __future__ import annotations

from typing import NamedTuple

import torch

from analyzer.meta.state import current

Tensor = torch.Tensor


class HostCopy:
    """A copy on the host of all the memory that a tensor is a view of."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        flat = _flatten(tensor)
        if self.device.type == "cpu":
            self._contents = flat.clone()  # a run on the host: the same program
        else:
            self._contents = torch.empty_like(flat, device="cpu", pin_memory=torch.cuda.is_available())
            self._contents.copy_(flat)
        state = current()
        if state is not None and state.recorder is not None:
            state.recorder.mark([self._contents], "host copy")  # no activation, wherever the run takes place

    def describe(self, tensor: Tensor) -> HostTensor:
        """``tensor``, a view of the memory that was copied, as a view of the copy."""
        return HostTensor(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
                          tensor.is_conj(), tensor.is_neg())

    def bring_back(self) -> Tensor:
        """The contents on the device that they came from, as one flat tensor: a new one for each use."""
        if self.device.type == "cpu":
            return self._contents.clone()
        return self._contents.to(self.device, non_blocking=self._contents.is_pinned())


class HostTensor(NamedTuple):
    """A tensor whose memory is a host copy."""

    copy: HostCopy
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def bring_back(self) -> Tensor:
        """The tensor on the device."""
        tensor = self.copy.bring_back().view(self.dtype).as_strided(self.shape, self.strides, self.offset)
        tensor = tensor._neg_view() if self.is_neg else tensor
        return tensor.conj() if self.is_conj else tensor


def _flatten(tensor: Tensor) -> Tensor:
    """All the memory that ``tensor`` is a view of, in one dimension, with no sign or conjugation left to be applied."""
    tensor = tensor.detach()
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = tensor._neg_view() if tensor.is_neg() else tensor
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
