"""What a simulated device adds to tensors without data: kernels that the dispatcher calls ahead of autograd, also where
C++ code calls an operator (dropout inside attention, the backward pass). They are registered at the autocast keys of
two backends that are in no build of PyTorch but their own: these keys come before autograd, no tensor carries them, and
they are excluded in every thread until it says otherwise. All names used are private: ``torch._C._dispatch_*``.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .address_space import MetaStorage, find_storage
from .intercept.replacement import Undo
from .spec import Signature
from .state import MetaState, current
from .tensor import device_of, is_around_tensors, kernel

Tensor = torch.Tensor


class GatedKernels:
    """The kernels at one dispatch key, which do nothing in a thread until it calls ``set_open(True)``."""

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
        return op.redispatch(keyset & self._later, *args, **kwargs)

    def install(self) -> Undo:
        if self._fallthrough is None:
            # of all other operators: it stays, for registering it touches every operator of the process
            self._fallthrough = torch.library.Library("_", "IMPL", self.key_name)
            self._fallthrough.fallback(torch.library.fallthrough_kernel)
        library = torch.library.Library("aten", "IMPL", self.key_name)
        for name, impl in self._impls.items():
            library.impl(name, impl, with_keyset=True)
        return library._destroy

    def set_open(self, is_open: bool) -> None:
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
    for a in args:
        if isinstance(a, Tensor):
            if device_type_of(state, a) == device_type:
                return True
        elif isinstance(a, (list, tuple)) and any_on(state, device_type, a):
            return True
    return False


class SimulatedDevice(NamedTuple):
    """The kernels of a device, the memory that its libraries take, and torch's answers about it."""

    gates: tuple[GatedKernels, ...]  #: its kernels ahead of autograd
    replacements: Callable[[], Iterator[Undo]]  #: registers its kernels, replaces what asks its driver
    enter_thread: Callable[[], None]  #: lets this thread's calls reach its kernels: a mode begins here
    leave_thread: Callable[[], None]  #: the mode of this thread ends
    library_needs: Callable[[Signature], tuple[str, ...]]  #: the libraries whose workspace a call asks for
    take_library_workspaces: Callable[[MetaState, Signature, tuple[str, ...]], None]  #: that are not there yet


devices: list[SimulatedDevice] = []
_gates: list[GatedKernels] = []


def load_devices() -> None:
    """Import the device that comes with the package, which registers itself: a mode begins, and reads `devices`."""
    importlib.import_module("analyzer.cuda")


def register_simulated_device(device: SimulatedDevice) -> None:
    devices.append(device)
    _gates.extend(device.gates)


def gate_keys() -> tuple[torch._C.DispatchKey, ...]:
    return tuple(gate.key for gate in _gates)


class reopened:
    """A context in a dispatch mode's handler, where torch excludes all keys above its own: open kernels are reached."""

    __slots__ = ("_excluded",)
    _is_closing = False

    def __enter__(self) -> None:
        self._excluded = [gate.set_excluded(self._is_closing) for gate in _gates]

    def __exit__(self, *exc: object) -> None:
        for gate, excluded in zip(_gates, self._excluded):
            gate.set_excluded(excluded)


class closed(reopened):
    """A context in such a kernel: what it calls reaches none of them."""

    __slots__ = ()
    _is_closing = True
