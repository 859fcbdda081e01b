"""What a simulated device adds to tensors without data. The room of a device registers itself here, once."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .intercept.gated_kernel import GatedKernels
from .intercept.replacement import Undo
from .spec import Signature
from .state import MetaState


class SimulatedDevice(NamedTuple):
    """The kernels of a device, the memory that its libraries take, and torch's answers about it."""

    gates: tuple[GatedKernels, ...]  #: its kernels ahead of autograd
    #: registers its kernels and replaces what asks its driver; each result undoes one step
    replacements: Callable[[], Iterator[Undo]]
    enter_thread: Callable[[], None]  #: lets this thread's calls reach its kernels: a mode begins here
    leave_thread: Callable[[], None]  #: the mode of this thread ends
    #: the libraries whose workspace a call asks for, in order
    library_needs: Callable[[Signature], tuple[str, ...]]
    #: allocates the workspaces of these libraries that are not there yet; they stay
    take_library_workspaces: Callable[[MetaState, Signature, tuple[str, ...]], None]


devices: list[SimulatedDevice] = []
_gates: list[GatedKernels] = []


def register_simulated_device(device: SimulatedDevice) -> None:
    """Make ``device`` part of every `MetaTensorMode`."""
    devices.append(device)
    _gates.extend(device.gates)


def gate_keys() -> tuple[torch._C.DispatchKey, ...]:
    """The dispatch keys of all kernels ahead of autograd."""
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
