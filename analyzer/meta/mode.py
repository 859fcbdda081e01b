"""`MetaTensorMode`: any torch code, no data, no accelerator."""
from __future__ import annotations

from typing import Any

import torch

from .active_mode import modes
from .address_space import AddressSpace
from .dispatch.accumulation import learn_counts
from .dispatch.mode import MetaDispatchMode
from .function import MetaFunctionMode
from .intercept.interrupt import InterruptsHeld
from .intercept.patch import mode_replacements
from .options import MetaOptions
from .simulated_device import devices
from .state import CPU, MetaState, active


class MetaTensorMode:
    """Under this context torch code runs without data: every tensor made is a `MetaTensor` that claims its device.

    ``options`` (`MetaOptions`) set the allocator and the policy for data-dependent sizes. The same object can be
    entered again and nested; torch is as it was after the last exit, also when an exception leaves.

    >>> with MetaTensorMode():
    ...     layer = torch.nn.Linear(4096, 4096).cuda()
    ...     y = layer(torch.rand(8, 4096, device="cuda"))
    >>> y.device, y.shape, torch.cuda.is_available()
    (device(type='cuda', index=0), torch.Size([8, 4096]), False)
    """

    def __init__(self, options: MetaOptions | None = None, *, adopted_claim: torch.device = CPU) -> None:
        self.options = options or MetaOptions()
        self.space = AddressSpace(self.options.allocator, self.options.capacity_bytes)
        self.adopted_claim = adopted_claim
        self._entered: list[tuple[MetaState | None, bool]] = []

    def make_state(self) -> MetaState:
        """A state for one activation of the mode."""
        return MetaState(options=self.options, space=self.space, adopted_claim=self.adopted_claim)

    def __enter__(self) -> MetaTensorMode:
        depth = len(self._entered)
        try:
            with InterruptsHeld():
                self._push()
        except BaseException as error:
            if len(self._entered) > depth:
                self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        with InterruptsHeld():
            self._pop(exc)

    def _push(self) -> None:
        before = active.state
        state = self.make_state()
        outermost = modes.function is None
        if outermost:
            mode_replacements.install()
            function, dispatch = MetaFunctionMode(), MetaDispatchMode()
            function.state = dispatch.state = state
            try:
                function.__enter__()
                dispatch.__enter__()
            except BaseException:
                mode_replacements.uninstall()
                raise
            modes.function, modes.dispatch = function, dispatch
            for device in devices:
                device.enter_thread()
        else:
            assert modes.function is not None and modes.dispatch is not None
            modes.function.state = modes.dispatch.state = state
        active.state = state
        self._entered.append((before, outermost))
        learn_counts()

    def _pop(self, exc: tuple[Any, ...]) -> None:
        before, outermost = self._entered.pop()
        active.state = before
        function, dispatch = modes.function, modes.dispatch
        assert function is not None and dispatch is not None
        if outermost:
            modes.function = modes.dispatch = None
            for device in devices:
                device.leave_thread()
            try:
                dispatch.__exit__(*exc)
                function.__exit__(*exc)
            finally:
                mode_replacements.uninstall()
        else:
            function.state = dispatch.state = before

    @property
    def state(self) -> MetaState:
        """The state of the innermost activation in this thread."""
        assert active.state is not None
        return active.state
