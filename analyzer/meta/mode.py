"""`MetaTensorMode`: any torch code, no data, no accelerator."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch

from . import argument as collective
from .address_space import AddressSpace
from .dispatch.mode import MetaDispatchMode, counts_are_known, learn_counts
from .function.mode import MetaFunctionMode
from .intercept.mode_stack import cut_mode_stacks, mode_stack_depths, unset_fake_temporarily
from .intercept.patch import mode_replacements
from .intercept.replacement import InterruptsDeferred
from .simulated_device import devices, load_devices
from .state import CPU, MetaOptions, MetaState, active, set_state
from .tensor import kernel


class MetaTensorMode:
    """Under this context torch code runs without data: every tensor made is a `MetaTensor` on a simulated device.

    ``options`` (`MetaOptions`) set the allocator and the policy for data-dependent sizes. The same object can be
    entered again and nested; torch is as it was after the last exit, also when an exception leaves.

    >>> with MetaTensorMode():
    ...     layer = torch.nn.Linear(4096, 4096).cuda()
    ...     y = layer(torch.rand(8, 4096, device="cuda"))
    >>> y.device, y.shape, torch.cuda.is_available()
    (device(type='cuda', index=0), torch.Size([8, 4096]), False)
    """

    def __init__(self, options: MetaOptions | None = None, *, adopted_device: torch.device = CPU,
                 space: AddressSpace | None = None, is_this_machine: bool = False,
                 has_plain_tensors: bool = False) -> None:
        self.options = options or MetaOptions()
        self.space = space or AddressSpace(self.options.allocator, self.options.capacity_bytes,
                                           self.options.devices)
        # in a block of the user's own nothing is repeated at once: all that memory_stats tells is known
        self.space.counts = self.space.counts or space is None and not has_plain_tensors
        self.adopted_device, self.is_this_machine = adopted_device, is_this_machine
        self.has_plain_tensors = has_plain_tensors
        self._entered: list[ExitStack] = []

    def __enter__(self) -> MetaTensorMode:
        with ExitStack() as undo:
            undo.enter_context(InterruptsDeferred())  # first: from now on no signal interrupts what enters or leaves
            self._activate(undo)
            self._entered.append(undo.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def _activate(self, undo: ExitStack) -> None:
        load_devices()
        state = MetaState(self.options, self.space, self.adopted_device)
        state.device_count = self.options.devices if collective.impl is None else collective.impl.device_count
        state.join = _join
        state.has_plain_tensors = self.has_plain_tensors or (
            active.state is not None and active.state.has_plain_tensors)
        state.is_this_machine = self.is_this_machine if active.state is None else active.state.is_this_machine
        undo.push(state.raise_failure)
        if active.dispatch_mode is None:
            undo.enter_context(mode_replacements.installed())
        undo.callback(state.space.give_to, state.space.owner)
        state.space.give_to(get_ident())
        _enter_thread(undo, state)
        if not counts_are_known():  # in a memory of its own: addresses of the run are those of any other
            set_state(MetaState(MetaOptions(), AddressSpace(), CPU))
            learn_counts()
        set_state(state)

    @property
    def state(self) -> MetaState:
        """The state of the innermost activation in this thread."""
        assert active.state is not None
        return active.state


def _enter_thread(undo: ExitStack, state: MetaState) -> None:
    """Let what runs in this thread belong to ``state``, under the two modes; ``undo`` gets what ends it."""
    before = active.state
    if active.dispatch_mode is None:
        undo.enter_context(unset_fake_temporarily())  # a FakeTensorMode around would take what kernels make on meta
        undo.callback(cut_mode_stacks, *mode_stack_depths())
        kernel.depth = 0
        function, dispatch = MetaFunctionMode(), MetaDispatchMode()
        function.state = dispatch.state = state
        undo.enter_context(function)
        undo.enter_context(dispatch)
        undo.callback(_forget_modes)
        active.function_mode, active.dispatch_mode = function, dispatch
        for device in devices:
            undo.callback(device.leave_thread)
            device.enter_thread()
    undo.callback(set_state, before)
    set_state(state)


@contextmanager
def _join(state: MetaState) -> Iterator[None]:
    with ExitStack() as undo:
        _enter_thread(undo, state)
        yield


def _forget_modes() -> None:
    active.function_mode = active.dispatch_mode = None
