"""Values of a forward pass whose saved copies wait on the host for the backward pass."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from analyzer.meta.structure import tensors_of

from .host_copy import HostCopy, HostTensor
from .storage_table import StorageTable

Tensor = torch.Tensor


class OffloadedTensors:
    """Sends what autograd saves of chosen values to the host, once for each storage, and brings it back in backward.

    What runs inside ``with offloaded:`` saves as usual, except tensors that share memory with a value given to ``add``,
    before or in the same block: they are copied when it ends. Other saved-tensor hooks do not see what is saved inside.

    Raises RuntimeError at the end of a block that wrote in place to what it saved (autograd would, in backward).

    >>> offloaded = OffloadedTensors()
    >>> x = torch.ones(2, requires_grad=True)
    >>> with offloaded:
    ...     y = x.exp()
    ...     offloaded.add(y)
    >>> y.sum().backward()
    >>> torch.equal(x.grad, x.detach().exp())
    True
    """

    def __init__(self) -> None:
        self._copies: StorageTable[_Copies] = StorageTable()
        self._saved: list[weakref.ref[_Saved]] = []  # in the open block
        self._hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> None:
        hooks = saved_tensors_hooks(self._pack, _Saved.unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *exc: Any) -> None:
        self._hooks.pop().__exit__()
        saved, self._saved = self._saved, []
        if exc == (None, None, None):
            for ref in saved:
                if (one := ref()) is not None and (copies := self._copies.find(one.tensor)) is not None:
                    one.move(copies)

    def add(self, value: Any) -> None:
        """Let the memory of the tensors in ``value`` wait on the host wherever it is saved."""
        for tensor in tensors_of(value):
            if self._copies.find(tensor) is None:
                self._copies.put(tensor, _Copies())

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # detached, as a result that holds itself would never be freed
        self._saved.append(weakref.ref(saved))
        return saved


class _Copies:
    """The host copy of one storage; another one after it was written to. Held by what is saved alone."""

    def __init__(self) -> None:
        self._version = -1
        self._copy: weakref.ref[HostCopy] | None = None

    def of(self, tensor: Tensor) -> HostCopy:
        copy = None if self._copy is None or tensor._version != self._version else self._copy()
        if copy is None:
            copy = HostCopy(tensor)
            self._copy, self._version = weakref.ref(copy), tensor._version
        return copy


class _Saved:
    """What autograd holds in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._on_host: HostTensor | None = None

    def move(self, copies: _Copies) -> None:
        if self.tensor._version != self._version:
            raise RuntimeError(f"a tensor of shape {tuple(self.tensor.shape)} that is needed for the gradient was "
                               "changed in place before it could be copied to the host")
        self._on_host = copies.of(self.tensor).describe(self.tensor)
        del self.tensor

    def unpack(self) -> Tensor:
        return self.tensor if self._on_host is None else self._on_host.bring_back()
