"""Kernels that the dispatcher calls ahead of autograd, in threads that ask for them and in no other. What a simulated
device does differently from meta must also be seen where C++ code calls an operator (dropout inside attention, a
softmax inside a loss, every operator of the backward pass). So such kernels are registered with the dispatcher, at the
autocast keys of two backends that are in no build of PyTorch but their own: these keys come before autograd, no tensor
carries them, and they are excluded in every thread until it says otherwise. All names used are private to torch:
``torch._C._dispatch_*``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.state import MetaState, current
from analyzer.meta.tensor import device_of, is_around_tensors, kernel

from .replacement import Undo

Tensor = torch.Tensor


class GatedKernels:
    """The kernels at one dispatch key. ``install`` registers them for the process and returns what undoes that; they do
    nothing until a thread calls ``set_open(True)``, and in other threads nothing at all.
    """

    def __init__(self, key_name: str) -> None:
        self.key_name = key_name
        self.key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, key_name)
        self._later = torch._C._dispatch_keyset_full_after(self.key)
        self._impls: dict[str, Callable[..., Any]] = {}
        self._fallthrough: torch.library.Library | None = None

    def add(self, op: torch._ops.OpOverload, impl: Callable[..., Any]) -> None:
        """Call ``impl(keyset, *args, **kwargs)`` for ``op``; `redispatch` goes on to the operator's own kernel."""
        self._impls[op.name().removeprefix("aten::")] = impl

    def redispatch(self, op: Any, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``op`` does without the kernels of this key."""
        return op.redispatch(keyset & self._later, *args, **kwargs)

    def install(self) -> Undo:
        """Register the kernels; the result undoes it."""
        if self._fallthrough is None:
            # Of all other operators. It stays: registering it touches every operator of the process, and a kernel that
            # does nothing, at a key that is excluded everywhere, changes nothing.
            self._fallthrough = torch.library.Library("_", "IMPL", self.key_name)
            self._fallthrough.fallback(torch.library.fallthrough_kernel)
        library = torch.library.Library("aten", "IMPL", self.key_name)
        for name, impl in self._impls.items():
            library.impl(name, impl, with_keyset=True)
        return library._destroy

    def set_open(self, is_open: bool) -> None:
        """Let this thread's calls reach the kernels, or no longer."""
        torch._C._dispatch_tls_set_dispatch_key_included(self.key, is_open)
        torch._C._dispatch_tls_set_dispatch_key_excluded(self.key, not is_open)

    def set_excluded(self, is_excluded: bool) -> bool:
        """Keep this thread's calls from open kernels, or let them through; whether they were kept before."""
        before: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(self.key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(self.key, is_excluded)
        return before


def device_type_of(state: MetaState, tensor: Tensor) -> str:
    """The type of device that ``tensor`` is on; those with data are where the mode takes them to be."""
    if tensor.layout is torch.strided:
        storage = find_storage(tensor)
        if type(storage) is MetaStorage:
            return storage.device.type
        if is_around_tensors(tensor):
            return device_of(tensor).type
    elif (device := tensor.__dict__.get("_device")) is not None:
        return str(device.type)
    real: torch.device = torch._C.TensorBase.device.__get__(tensor)
    return state.adopted_device.type if real.type in ("cpu", "meta") else real.type


def is_simulating() -> MetaState | None:
    """The mode's state where a call is simulated: not inside a kernel, nor computing known contents."""
    if kernel.depth or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        return None
    return current()


def any_on(state: MetaState, device_type: str, args: Any) -> bool:
    """Whether a tensor among ``args`` (lists included) is on a ``device_type``."""
    for a in args:
        if isinstance(a, Tensor):
            if device_type_of(state, a) == device_type:
                return True
        elif isinstance(a, (list, tuple)) and any_on(state, device_type, a):
            return True
    return False
