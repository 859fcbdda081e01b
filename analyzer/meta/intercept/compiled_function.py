"""Private names of Dynamo: functions and modules under torch.compile, which a mode calls as they are written.

Dynamo would look into frames of code that runs under the mode, and a compiler that sees tensors without data ends the
process. So compiled functions are called as they were written, and the mode's own compiler (`MetaState.compile`) gets
the call.
"""
from __future__ import annotations

import builtins
import copy
import gc
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch._compile

from analyzer.meta.source_line import is_called_by_user
from analyzer.meta.state import MetaState, active_state, current
from analyzer.output import hold_over_forks

from .replacement import Undo, answer, made_once, replace, supply

_DYNAMO = "torch._dynamo.eval_frame"
#: attributes that Dynamo gives a compiled module and the function that it makes of one
COMPILER_ATTRIBUTES = frozenset({"dynamo_ctx", "get_compiler_config", "_torchdynamo_wrapper_id"})


def _frames() -> Any:
    """Dynamo's module of compiled functions, which is there once something was compiled."""
    return sys.modules[_DYNAMO]


def compiler_replacements() -> Iterator[Undo]:
    """What is replaced in torch for the sake of compiled functions."""
    yield supply(torch._compile, "getattr", _get_without_dynamo)
    yield _run_compiled
    _run_eagerly()
    yield from _callers()


@made_once
def _callers() -> Iterator[Undo]:
    for owner, name in _OUTSIDE:
        yield replace(owner, name, partial(_leaving, owner is logging.Logger))
    yield replace(torch.autograd.Function, "apply", _applying)
    yield answer(torch, "compile", _compile, passes_original=True)
    for name in ("is_compiling", "is_dynamo_compiling"):
        yield answer(torch.compiler, name, lambda: True, where=lambda: getattr(current(), "graph", None))


def _get_without_dynamo(function: Any, name: str, *default: Any) -> Any:
    """``getattr`` for ``torch._compile``, which asks what is not to be compiled for ``__dynamo_disable`` and imports
    the compiler, slower than most profiles, to make it: until something else has, the function itself will do.
    """
    if name == "__dynamo_disable" and "torch._dynamo" not in sys.modules and current() is not None:
        return function
    return getattr(function, name, *default)


_compiled: list[Undo] = []  # what lets functions that are compiled run so again


def _run_eagerly() -> None:
    """Keep Dynamo from looking at frames; each function is given to the mode's compiler where it is first called."""
    if not _compiled and _DYNAMO in sys.modules:
        _compiled.append(replace(_frames(), "_callback_from_stance", _redirecting))
        _compiled.append(answer(torch._dynamo, "graph_break", _break_graph))


def _run_compiled() -> None:
    while _compiled:
        _compiled.pop()()


def _redirecting(original: Any) -> Any:
    """What each compiled function calls before it calls the one that it was made of, which its closure holds."""
    def ask(callback: Any) -> Any:
        if current() is None:
            return original(callback)
        frame = sys._getframe(1)
        if frame.f_code.co_name in ("compile_wrapper", "_fn"):
            _redirect(frame)
        return None
    return ask


def _redirect(frame: Any) -> None:
    function = frame.f_locals["fn"]
    if isinstance(function, (_CallThroughCompiler, _DisabledCall)):
        return
    is_disabled = frame.f_code.co_name == "_fn"
    module = f"{getattr(function, '__module__', None)}."
    # Keeping the compiler out matters within a compiled function alone, and to find what was made of a function takes
    # tenths of a second. Left out there: torch's own but for optimizers, and DeepSpeed's hooks, one for each module.
    if is_disabled and (active_state().tracing is None or module.startswith(("torch.", "deepspeed.")) and (
            not module.startswith("torch.optim.") or getattr(function, "__name__", "") == "_init_group")):
        return
    context = frame.f_locals["self"]
    settings = compiler_settings(context)
    for wrapper in _find_functions(frame.f_code, function, context):
        cell = wrapper.__closure__[frame.f_code.co_freevars.index("fn")]
        _compiled.append(partial(setattr, cell, "cell_contents", function))
        cell.cell_contents = _DisabledCall(function) if settings is None else _CallThroughCompiler(function, settings)


_searching = threading.RLock()  #: a thread that searches finds what another one has unfrozen
hold_over_forks(_searching)


def _find_functions(code: Any, function: Any, context: Any) -> list[Any]:
    """What Dynamo's ``context`` made of ``function``, which a frame of this code does not tell. Where it is among the
    objects from before ``gc.freeze()``, all are searched, and are frozen again with those that came since.
    """
    def search() -> list[Any]:
        return [found for found in gc.get_referrers(code)
                if getattr(found, "_torchdynamo_orig_callable", None) is function and found.__code__ is code
                and found.__closure__[code.co_freevars.index("self")].cell_contents is context]

    with _searching:
        wrappers = search()
        if not wrappers and gc.get_freeze_count():
            gc.unfreeze()
            try:
                wrappers = search()
            finally:
                gc.freeze()
    return wrappers


def compiler_settings(context: Any) -> dict[str, Any] | None:
    """How Dynamo's ``context`` compiles what it is around, as far as the user said it: the backend, ``fullgraph``,
    ``dynamic`` and Inductor's options by name; None where it keeps the compiler out.
    """
    if isinstance(context, _frames().DisableContext):
        return None
    backend = _backend_of(context)
    found = {"backend": getattr(backend, "compiler_name", getattr(backend, "__name__", str(backend)))}
    if context.fullgraph:
        found["fullgraph"] = True
    if context._dynamic is not None:
        found["dynamic"] = context._dynamic
    return {**found, **getattr(backend, "config", {})}


def _backend_of(context: Any) -> Any:
    """The compiler in the callbacks of a context (``innermost_backend`` of Dynamo's eval_frame.py, from 2.11 on)."""
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def settings_of_module(module: torch.nn.Module) -> dict[str, Any] | None:
    """How a module under torch.compile is compiled, or one of `torch.compiler.disable`, for which it is None."""
    call = module.__dict__.get("_compiled_call_impl")
    return compiler_settings(module.dynamo_ctx if call is None else _context_of(call))


def _context_of(function: Any) -> Any:
    """Dynamo's context that made a compiled function."""
    return inspect.getclosurevars(function.get_compiler_config).nonlocals["self"]


MODULE_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")  #: names of what calls a module's hooks and its forward


class _CallThroughCompiler:
    """Calls a function as the mode's compiler compiles it; as it is where no mode is, or the user wants it so."""

    def __init__(self, function: Any, config: dict[str, Any]) -> None:
        self.function, self.config = function, config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or _frames()._stance.stance == "force_eager":
            return self.function(*args, **kwargs)
        if self.config.get("fullgraph") and torch.__version__ >= "2.12":
            _frames().set_fullgraph_compiled_frame_count(-1)  # for afterwards torch asks whether Dynamo compiled any
        module = self._find_called()
        if module is None:
            return state.compile(self.function, args, kwargs, self.config)
        with compiling_forward(state, module, self.config):
            return self.function(*args, **kwargs)

    def _find_called(self) -> torch.nn.Module | None:
        """The module that the function calls, hooks and all; None where it is any other function, such as a forward."""
        owner = getattr(self.function, "__self__", None)
        if owner is not None:
            return owner if isinstance(owner, torch.nn.Module) and self.function.__name__ in MODULE_CALLS else None
        around = getattr(self.function, "__wrapped__", None)  # of what Dynamo's wrap_inline(module) makes
        return around if isinstance(around, torch.nn.Module) and module_behind(around) is not None else None


class _DisabledCall:
    """Calls a function that the compiler is kept out of."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        with outside_of_graph(f"torch.compiler.disable keeps the compiler out of {name}"):
            return self.function(*args, **kwargs)


def written_function(value: Any) -> Any:
    """The function that is compiled, or kept from it, where its own call is in its place meanwhile; else ``value``."""
    return value.function if isinstance(value, (_CallThroughCompiler, _DisabledCall)) else value


def written_forward(module: torch.nn.Module) -> Any:
    """The forward of a module; of ``torch.compile(module)`` that of the module behind it, which names its arguments."""
    return getattr(module, "_torchdynamo_orig_callable", module.forward)


def outside_of_graph(reason: str) -> AbstractContextManager[None]:
    """A block in which what is called runs as it is written, also where a compiled function calls it."""
    state = current()
    if state is None or state.tracing is None:
        return nullcontext()
    return state.tracing.outside(reason)  # type: ignore[no-any-return]


def _break_graph(msg: str = "") -> None:
    if is_called_by_user():
        with outside_of_graph(f"torch._dynamo.graph_break({msg!r})" if msg else "torch._dynamo.graph_break()"):
            pass


#: functions of Python that Dynamo has in no graph; before torch 2.12 ``_builtin_function_ids`` of its trace_rules.py
_OUTSIDE = ((builtins, "print"), (builtins, "open"), (time, "time"), (time, "perf_counter"), *[
    (logging.Logger, name) for name in ("debug", "info", "warning", "error", "critical")], *(
    [] if torch.__version__ >= "2.12" else [(copy, "deepcopy")]))


def _leaving(tells_caller: bool, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if tells_caller:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if getattr(current(), "tracing", None) is None or not is_called_by_user():
            return original(*args, **kwargs)
        with outside_of_graph(f"{original.__name__} is called"):
            return original(*args, **kwargs)
    return call


_APPLY = inspect.getattr_static(torch.autograd.Function, "apply")


def bind_apply(original: Any) -> Callable[[type], Callable[..., Any]]:
    """What binds ``torch.autograd.Function.apply``, or what replaces it, to a class of functions."""
    # from torch 2.14 on it is written in C
    return partial(partial, original.__func__) if hasattr(original, "__func__") else partial(_APPLY.__get__, None)


def _applying(original: Any) -> Any:
    bind = bind_apply(original)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.tracing is None or cls.__module__.startswith("analyzer."):
            return bind(cls)(*args, **kwargs)
        return state.tracing.dispatch(cls.apply, args, kwargs, lambda function, a, k: bind(cls)(*a, **k))
    return classmethod(apply)


def compiled_from(function: Any) -> tuple[Any, ...] | None:
    """Of what torch.compile gives for a function: that function, and how it is compiled; None for another one."""
    if not hasattr(function, "_torchdynamo_orig_callable") or not hasattr(function, "get_compiler_config"):
        return None
    context = _context_of(function)
    return (function._torchdynamo_orig_callable, _backend_of(context), context.fullgraph, context._dynamic,
            context.compiler_config)


def module_behind(module: torch.nn.Module) -> torch.nn.Module | None:
    """Of a module whose frames Dynamo skips (one of DDP or FSDP; one of ``fully_shard``, whose hooks it leaves alone),
    the module whose forward it compiles next; None of any other.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return cast(torch.nn.Module, module.module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return module._fsdp_wrapped_module  # type: ignore[no-any-return]
    return module if fsdp is not None and isinstance(module, fsdp.FSDPModule) else None


@contextmanager
def compiling_forward(state: MetaState, module: torch.nn.Module, config: dict[str, Any],
                      is_inlined: bool = False) -> Iterator[None]:
    """A block in which the forward of a compiled ``module`` is compiled. Its hooks are outside of the graph, as are
    those of FSDP: Dynamo skips the frame of ``Module._call_impl`` (torch/_dynamo/trace_rules.py) and looks at forward,
    unless that ``is_inlined`` in a frame that ``torch.compile(module)`` puts around it.
    """
    behind = module_behind(module)
    is_inlined = is_inlined and behind is None
    while behind is not None and behind is not module:
        module, behind = behind, module_behind(behind)
    attributes, forward = object.__getattribute__(module, "__dict__"), module.forward  # of which no watch is told
    before = attributes.get("forward")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if compiled_from(forward) is not None:  # torch.compile(module.forward), which Dynamo skips here
            return forward(*args, **kwargs)
        return state.compile(forward, args, kwargs, config, not is_inlined)

    attributes["forward"] = compiled
    try:
        yield
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def _compile(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    _run_eagerly()
    return result


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """A block in which backward graphs run as they are, where the user has them compiled."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is None or not compiler.compiled_autograd_enabled:
        return nullcontext()
    active_state().assume("compiled autograd is not followed: each backward graph runs by itself, as without it")
    return compiler._disable()  # type: ignore[no-any-return]
