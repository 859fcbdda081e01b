"""The dispatch half of the mode: the way of one operator call, from its arguments to the log."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta import argument as collective
from analyzer.meta.intercept.mode_stack import DirectDispatchMode
from analyzer.meta.intercept.replacement import call_handlers, waiting
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.simulated_device import reopened
from analyzer.meta.spec import name_arguments
from analyzer.meta.state import MetaState, mode_in_force
from analyzer.meta.value.data_dependent import answer_data_dependent

from .account import ADD_IN_PLACE, account, account_for_answer, is_engines_sum
from .device_check import check_devices, follow_met
from .execute import execute
from .propagate import propagate
from .resolve import OperatorCall, resolve


class MetaDispatchMode(DirectDispatchMode):
    """The dispatch half of `MetaTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None
        self._whole: list[Any] = []  # operators that are not taken apart, on the parts of tensors either

    @contextmanager
    def staying_whole(self, op: Any) -> Iterator[None]:
        """A block in which ``op`` is not taken apart."""
        self._whole.append(op)
        try:
            yield
        finally:
            self._whole.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if waiting:
            call_handlers()
        for kind in types:
            # a tensor around tensors (nested, quantised): what it does with them comes here
            if getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl:
                if kind.__name__ == "DTensor":  # which calls the same operator again
                    return self._call_sharded(kind, func, args, kwargs or {})
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

    def _call_sharded(self, kind: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of sharded tensors: NotImplemented hands it to their class, which calls it on their parts."""
        answer = collective.redispatching.get(kind)
        if answer is None:
            raise InputError(f"{func} of a DTensor outside a world of ranks: run this inside `with "
                             "analyzer.parallel.world(...)`, or profile the module as it is before it is wrapped")
        return answer(func, args, kwargs, self.handle)

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
        whole = whole or func in self._whole
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
            check_devices(state, call)
            answer = answer_data_dependent(state, info, call.args, call.kwargs, call.tensors)
            if answer is not NotImplemented:
                account_for_answer(state, call, answer)
                return answer
        if info.communicates and collective.impl is not None:
            return _communicate(state, call, collective.impl)
        execute(state, call)
        if state.meets_data:
            follow_met(call)
        propagate(state, call)
        account(state, call)
        return call.result


def _communicate(state: MetaState, call: OperatorCall, impl: collective.CollectiveImpl) -> Any:
    """The result of an operator that other ranks take part in."""
    given = name_arguments(call.info.op, call.args, call.kwargs)
    with impl.launching(call.info, given):
        execute(state, call)
        with torch._C.DisableTorchFunction():
            impl.propagate(call.info, given, call.result)
        account(state, call)
    return call.result
