"""Tells a recorder of module calls and of the phases of a step, by replacing four functions of torch for a while."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from analyzer.meta.patch import replace
from analyzer.meta.state import current

if TYPE_CHECKING:
    from .recorder import Recorder


@contextmanager
def listen(recorder: Recorder) -> Iterator[None]:
    """Report to ``recorder`` what runs in its thread; torch is as it was afterwards."""

    def mine() -> bool:
        state = current()
        return state is not None and state.recorder is recorder

    def module_call(original: Any) -> Any:
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return original(module, *args, **kwargs)
            token = recorder.enter_module(module, args, kwargs)
            result = None
            try:
                impl = recorder.find_leaf_impl(module)
                result = original(module, *args, **kwargs) if impl is None else impl(module, *args, **kwargs)
                return result
            finally:
                recorder.leave_module(module, token, result)

        return __call__

    def in_phase(phase: str) -> Any:
        def make(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not mine():
                    return original(*args, **kwargs)
                with recorder.during(phase):
                    return original(*args, **kwargs)

            return run

        return make

    with ExitStack() as undo:
        undo.callback(replace(torch.nn.Module, "__call__", module_call))
        undo.callback(replace(torch.autograd, "backward", in_phase("backward")))
        undo.callback(replace(torch.autograd, "grad", in_phase("backward")))
        undo.callback(replace(torch.optim.Optimizer, "zero_grad", in_phase("zero_grad")))
        undo.callback(_optimizer_steps(recorder, mine))
        yield


def _optimizer_steps(recorder: Recorder, mine: Any) -> Any:
    """Every optimizer's ``step`` is a method of its own class: torch's global hooks see them all."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(*_: Any) -> None:
        if mine():
            recorder.begin("optimizer")

    def after(*_: Any) -> None:
        if mine():
            recorder.resume("forward")

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
