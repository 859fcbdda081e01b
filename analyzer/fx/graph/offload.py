"""Values of a graph whose saved copies wait on the host, and facts about the storages behind them."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from analyzer.meta.state import current
from analyzer.meta.structure import tensors_of


def alias_with_version(tensor: Tensor) -> Tensor:
    """``tensor`` detached, with the same version counter, unlike other views that are made below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


V = TypeVar("V")


class StorageTable(Generic[V]):
    """A value for each storage, found through any tensor in it, while the storage lives; it keeps none alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], V]] = {}

    def put(self, tensor: torch.Tensor, value: V) -> None:
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = weakref.ref(storage), value

    def find(self, tensor: torch.Tensor) -> V | None:
        storage = tensor.untyped_storage()
        found = self._entries.get(storage._cdata)
        return None if found is None or found[0]() is not storage else found[1]


class HostCopy:
    """A copy on the host of all the memory that a tensor is a view of."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        # all the memory in one dimension, with no sign or conjugation left to be applied
        flat = tensor.detach()
        flat = flat.conj() if flat.is_conj() else flat
        flat = flat._neg_view() if flat.is_neg() else flat
        flat = flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
        if self.device.type == "cpu":
            self._contents = flat.clone()  # a run on the host: the same program
        else:
            self._contents = torch.empty_like(flat, device="cpu", pin_memory=torch.cuda.is_available())
            self._contents.copy_(flat)
        state = current()
        if state is not None and state.recorder is not None:
            state.recorder.memory.mark([self._contents], "host copy")  # no activation, wherever the run takes place

    def describe(self, tensor: Tensor) -> HostTensor:
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
        tensor = self.copy.bring_back().view(self.dtype).as_strided(self.shape, self.strides, self.offset)
        tensor = tensor._neg_view() if self.is_neg else tensor
        return tensor.conj() if self.is_conj else tensor


class OffloadedTensors:
    """Sends what autograd saves of chosen values to the host, once for each storage, and brings it back in backward: of
    what is saved inside ``with offloaded:``, tensors that share memory with a value given to ``add`` are copied when
    the block ends. Raises RuntimeError there where it wrote in place to what it saved (autograd would, in backward).
    """

    def __init__(self) -> None:
        self._chosen: StorageTable[_Copy] = StorageTable()
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
                if (one := ref()) is not None and (copy := self._chosen.find(one.tensor)) is not None:
                    one.move(copy)

    def add(self, value: Any) -> None:
        """Let the memory of the tensors in ``value`` wait on the host wherever it is saved."""
        for tensor in tensors_of(value):
            if self._chosen.find(tensor) is None:
                self._chosen.put(tensor, _Copy())

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # detached, as a result that holds itself would never be freed
        self._saved.append(weakref.ref(saved))
        return saved


class _Copy:
    """The host copy of one storage, made for one version of it. Held by what is saved alone."""

    version: int = -1
    made: Callable[[], HostCopy | None] = staticmethod(lambda: None)


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._on_host: HostTensor | None = None

    def move(self, copy: _Copy) -> None:
        if self.tensor._version != self._version:
            raise RuntimeError(f"a tensor of shape {tuple(self.tensor.shape)} that is needed for the gradient was "
                               "changed in place before it could be copied to the host")
        made = copy.made() if copy.version == self._version else None
        if made is None:
            made = HostCopy(self.tensor)
            copy.made, copy.version = weakref.ref(made), self._version
        self._on_host = made.describe(self.tensor)
        del self.tensor

    def unpack(self) -> Tensor:
        return self.tensor if self._on_host is None else self._on_host.bring_back()
