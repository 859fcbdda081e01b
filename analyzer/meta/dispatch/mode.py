"""The dispatch half of the mode: the way of one operator call, from its arguments to the log."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.interrupt import call_handlers, waiting
from analyzer.meta.intercept.mode_stack import DirectDispatchMode
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.simulated_device import reopened
from analyzer.meta.state import MetaState, mode_in_force
from analyzer.meta.value.data_dependent import answer_data_dependent

from .account import account, account_for_answer
from .accumulation import ADD_IN_PLACE, is_engines_sum
from .execute import execute
from .propagate import propagate
from .resolve import resolve


class MetaDispatchMode(DirectDispatchMode):
    """The dispatch half of `MetaTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if waiting:
            call_handlers()
        for kind in types:
            # a tensor around tensors (nested, quantised): what it does with them comes here
            if getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl:
                if kind.__name__ == "DTensor":  # which calls the same operator again
                    raise InputError(
                        f"{func} of a DTensor: ranks that share a tensor (fully_shard, parallelize_module) are not "
                        "supported; profile the module as it is before it is wrapped")
                with self, reopened(), mode_in_force():
                    return kind.__torch_dispatch__(func, types, args, kwargs or {})
        if is_engines_sum(func, args):
            func = ADD_IN_PLACE
        with torch._C.DisableTorchFunction():  # backward calls this with the function mode still active
            result = self.handle(func, args, kwargs)
        assert self.state is not None
        if self.state.tape is not None:
            self.state.tape.dispatched(func, args, kwargs or {}, result)
        return result

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, whole: bool = False) -> Any:
        """The result of an operator; one that is composed of others is taken apart, unless it is to stay ``whole``."""
        try:
            if self.state is not None and self.state.space.is_shared:
                with self.state.space.turn:
                    return self._handle(func, args, kwargs or {}, whole)
            return self._handle(func, args, kwargs or {}, whole)
        except DeviceOutOfMemoryError as error:
            if self.state is not None and self.state.recorder is not None:
                self.state.recorder.ran_out(str(func), error)
            raise

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Any:
        state = self.state
        assert state is not None
        info = describe_operator(func)
        if info.silent:
            return func(*args, **kwargs)
        if info.composite and not whole:
            with self, reopened():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if info.composition is not None and not whole:
            with self, reopened():
                result = info.composition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        call = resolve(state, info, args, kwargs)
        if info.data_dependent:
            answer = answer_data_dependent(state, info, call.args, call.kwargs, call.tensors)
            if answer is not NotImplemented:
                account_for_answer(state, call, answer)
                return answer
        execute(state, call)
        propagate(state, call)
        account(state, call)
        return call.result
