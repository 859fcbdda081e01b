"""Tensors of a block that wait on the host between its forward and backward pass, copied beside what is computed.

A device copies out and in at the same time, beside its kernels (CUDA C++ Programming Guide, "Concurrent Data
Transfers"). So there is a stream for each direction, and memory on the host is pinned. What a block sends has the time
of the next block's forward pass: when that ends, the kernels wait for the copies, and the memory is free from there on,
on every machine alike. A block's tensors come back while the backward pass of the block after it runs.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from analyzer.meta.state import MetaState, current


class CopyEngine:
    """The copies of all planned blocks of a model, in the order in which the blocks are called."""

    def __init__(self) -> None:
        self.last: BlockCopies | None = None  #: of the call of a block before this one
        self._streams: tuple[Any, Any] | None = None
        self._made_under: Callable[[], MetaState | None] = lambda: None

    def __reduce__(self) -> tuple[type[CopyEngine], tuple[()]]:
        """Streams and calls are of the process: a copied or saved model has an engine of its own."""
        return CopyEngine, ()

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """The streams to the host and from it; those of another simulation are not taken."""
        state = current()
        if self._streams is None or self._made_under() is not state:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._made_under = (lambda: None) if state is None else weakref.ref(state)
        return self._streams


class BlockCopies:
    """What one call of a block has on the host. Held by what autograd saves, and until the next call ends."""

    def __init__(self, engine: CopyEngine) -> None:
        self.engine = engine
        self.before, engine.last = engine.last, self
        self._sent: list[weakref.ref[OffloadedTensor]] = []

    @property
    def sent(self) -> list[OffloadedTensor]:
        return [offloaded for ref in self._sent if (offloaded := ref()) is not None]

    def send(self, tensor: Tensor) -> OffloadedTensor:
        offloaded = OffloadedTensor(tensor, self.engine)
        self._sent.append(weakref.ref(offloaded))
        return offloaded

    def end(self, output: Tensor | None) -> None:
        """The call has ended: the call before it lets go of what has been copied, and is fetched from when the gradient
        of ``output`` is there.
        """
        before, self.before = self.before, None
        if before is None:
            return
        for offloaded in before.sent:
            offloaded.let_go()
        if output is not None and before._sent:
            output.register_hook(lambda gradient: before.fetch())

    def fetch(self) -> None:
        for offloaded in self.sent:
            offloaded.fetch()


def can_wait_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, and its own: no view, no part of a sharded tensor."""
    return (not is_traceable_wrapper_subclass(tensor)
            and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


class OffloadedTensor:
    """A tensor that goes to the host, and comes back once; in a second backward pass it comes back again."""

    def __init__(self, tensor: Tensor, engine: CopyEngine) -> None:
        self.device = tensor.device
        self._form = tensor.size(), tensor.stride()
        self._engine = engine
        self._is_taken = False
        on_device = self.device.type != "cpu"
        self._host = torch.empty_strided(*self._form, dtype=tensor.dtype, device="cpu", pin_memory=on_device)
        state = current()
        if state is not None and state.recorder is not None:
            state.recorder.memory.mark([self._host], "host copy")  # no activation, wherever the run takes place
        self._tensor: Tensor | None = None   # on the device until it is copied
        self._back: tuple[Tensor, Any] | None = None
        if not on_device:
            self._host.copy_(tensor.detach())
            return
        self._tensor = tensor.detach()
        out, _ = self._engine.streams(self.device)
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            self._host.copy_(self._tensor, non_blocking=True)
            self._copied = out.record_event()

    def let_go(self) -> None:
        """Free the memory on the device: what runs there from now on waits until it is copied."""
        if self._tensor is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
            self._tensor = None

    def fetch(self) -> None:
        """Begin to bring it back, if it is not there and was not taken."""
        if self._tensor is None and self._back is None and not self._is_taken and self.device.type != "cpu":
            self._bring_back()

    def _bring_back(self) -> tuple[Tensor, Any]:
        tensor = torch.empty_strided(*self._form, dtype=self._host.dtype, device=self.device)
        _, back = self._engine.streams(self.device)
        back.wait_stream(torch.cuda.current_stream(self.device))  # the memory may be in use until then
        with torch.cuda.stream(back):
            tensor.copy_(self._host, non_blocking=True)
            self._back = tensor, back.record_event()
        return self._back

    def take(self) -> Tensor:
        """The tensor on its device, for what runs there from now on."""
        if self._tensor is not None:
            return self._tensor
        self._is_taken = True
        if self.device.type == "cpu":
            return self._host.clone()
        tensor, arrived = self._back or self._bring_back()
        torch.cuda.current_stream(self.device).wait_event(arrived)
        self._back = None
        return tensor
