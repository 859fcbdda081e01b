"""`MetaTensorMode`: any torch code, no data, no accelerator."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.meta.intercept import gates
from analyzer.meta.intercept.interrupt import InterruptsHeld
from analyzer.meta.intercept.patch import mode_replacements

from .accumulation import learn_counts
from .address_space import AddressSpace
from .dispatch import MetaDispatchMode
from .function import MetaFunctionMode
from .options import MetaOptions
from .state import CPU, MetaState, active


class _Modes(threading.local):
    """The pair of torch modes that this thread has pushed, if any; nested activations share it."""

    function: MetaFunctionMode | None = None
    dispatch: MetaDispatchMode | None = None


_modes = _Modes()


@contextmanager
def mode_in_force() -> Iterator[None]:
    """Push the function mode again inside its own handler, where torch has taken it off."""
    mode = _modes.function
    if mode is None or mode in torch.overrides._get_current_function_mode_stack():
        yield
        return
    with mode:
        yield


def active_dispatch_mode() -> MetaDispatchMode:
    """The dispatch half of the mode that is active in this thread."""
    assert _modes.dispatch is not None
    return _modes.dispatch


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
        outermost = _modes.function is None
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
            _modes.function, _modes.dispatch = function, dispatch
            gates.open_gates()
        else:
            assert _modes.function is not None and _modes.dispatch is not None
            _modes.function.state = _modes.dispatch.state = state
        active.state = state
        self._entered.append((before, outermost))
        learn_counts()

    def _pop(self, exc: tuple[Any, ...]) -> None:
        before, outermost = self._entered.pop()
        active.state = before
        function, dispatch = _modes.function, _modes.dispatch
        assert function is not None and dispatch is not None
        if outermost:
            _modes.function = _modes.dispatch = None
            gates.close_gates()
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
