"""A forward pass of a user's model, run without data for an observer of its modules and operators."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.api.argument import argument_names
from analyzer.api.run import open_run
from analyzer.api.session import Session
from analyzer.errors import DataDependentError
from analyzer.fx.module_wrapper import count_devices, find_place, uncompiled
from analyzer.meta.intercept.compiled_function import bind_apply
from analyzer.meta.intercept.replacement import replace
from analyzer.meta.intercept.shared_replacement import SharedReplacements
from analyzer.record.options import ProfileOptions
from analyzer.tools.runtime.measure import unchanged
from analyzer.tools.runtime.recorder import device_of, has_data

#: Is told that an operator ran: what, its positional arguments, its keyword arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _PreDispatchMode(SchemaCheckMode):
    """Sees operators as Python code calls them, before autograd: ``linear``, and not the ``addmm`` within.

    Private API: torch lets modes of three classes see operators there. This one is of the class whose place nothing
    else in a forward pass takes; it checks no schema.
    """

    def __init__(self, listener: Listener) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.listener(func, args, kwargs or {}, result)
        return result


@contextmanager
def watching_operators(listener: Listener) -> Iterator[None]:
    """Tell of each ATen operator that this thread calls."""
    mode = _PreDispatchMode(listener)
    with enable_python_dispatcher(), enable_pre_dispatch(), mode:
        yield


def observe_forward(make_observer: Callable[[], Any], model: torch.nn.Module, args: tuple[Any, ...],
                    kwargs: Mapping[str, Any] | None = None) -> Any:
    """The observer, which listens for the length of its ``observing()``, after it saw the model run.

    Nothing is computed: the model's tensors are borrowed, and everything is as it was afterwards. Only where the
    model's code asks for contents, and it has data, does it run on that. ``make_observer`` makes a new one for each
    run. Raises InputError where the model cannot be called so, and whatever the model itself raises.
    """
    kwargs = dict(kwargs or {})
    observer = make_observer()
    try:
        options = ProfileOptions(steps=1, keep_events=False, devices=count_devices(model, (args, kwargs)))
        session = Session(None, options, place=find_place(model, (args, kwargs)))
        with open_run(session, model) as run:
            run_args, run_kwargs = run.take_inputs(args, kwargs, argument_names(uncompiled(model), args, kwargs))
            with observer.observing():
                run.root(*run_args, **run_kwargs)
        return observer
    except DataDependentError:
        if not has_data(model):
            raise
    observer = make_observer()
    with unchanged(model, device_of(model), weights=False), observer.observing():
        model(*args, **kwargs)
    return observer


@contextmanager
def watching_modules(enter: Callable[[torch.nn.Module], None],
                     leave: Callable[[torch.nn.Module, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Tell of each call of a module in this thread: ``enter(module)``, then ``leave(module, args, result)``."""
    thread = threading.get_ident()

    def make(original: Any) -> Any:
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            enter(module)
            result = original(module, *args, **kwargs)
            leave(module, args, result)
            return result

        return __call__

    with SharedReplacements(lambda: [replace(torch.nn.Module, "__call__", make)]).installed():
        yield


@contextmanager
def watching_functions(run: Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]) -> Iterator[None]:
    """Have ``run(function, args, call)`` call each subclass of `torch.autograd.Function` that is applied in this
    thread, and each function of `torch.jit.script`.
    """
    thread = threading.get_ident()

    def make_apply(original: Any) -> Any:
        bind = bind_apply(original)

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            call = partial(bind(cls), *args, **kwargs)
            # what a simulated device does in place of an operator is no function of the model
            if threading.get_ident() != thread or cls.__module__.startswith("analyzer."):
                return call()
            return run(cls, args, call)

        return classmethod(apply)

    def make_call(original: Any) -> Any:
        def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:
            call = partial(original, function, *args, **kwargs)
            return call() if threading.get_ident() != thread else run(function, args, call)

        return __call__

    with SharedReplacements(lambda: [replace(torch.autograd.Function, "apply", make_apply),
                                     replace(torch.jit.ScriptFunction, "__call__", make_call)]).installed():
        yield
