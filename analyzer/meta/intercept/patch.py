"""What is replaced in torch while a mode is active anywhere; threads without one get torch's own behaviour."""
from __future__ import annotations

import builtins
import concurrent
import gc
import inspect
import itertools
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.pool import ThreadPool
from types import MethodWrapperType
from typing import Any, cast

import torch
import torch._compile
import torch.jit._builtins
import torch.nn.functional
import torch.nn.init
import torch.optim
import torch.overrides
import torch.utils._foreach_utils
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from analyzer.errors import InputError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.simulated_device import devices, gate_keys
from analyzer.meta.source_line import first_frame, is_called_by_user, is_user_code
from analyzer.meta.state import MetaState, active, active_state, current, mode_in_force
from analyzer.meta.tensor import META, PLAIN_TENSORS, MetaTensor, device_of

from .replacement import SharedReplacements, Undo, answer, replace, supply


def _overrides(values: Any) -> bool:
    """Whether a value's class overrides torch functions; the mode does not count: a real device has none."""
    if not torch._C._is_torch_function_enabled():
        return False
    return any(getattr(kind, "__torch_function__", None) not in (None, torch._C._disabled_torch_function_impl)
               for kind in map(type, values) if kind not in PLAIN_TENSORS)


def _asking(values_of: Any, original: Any) -> Any:
    def ask(*given: Any) -> Any:
        return original(*given) if current() is None else _overrides(values_of(*given))
    ask.in_place_of = original  # type: ignore[attr-defined]  # what TorchScript is to compile
    return ask


def _replacements() -> Iterator[Undo]:
    for owner in (torch.nn.functional, torch.overrides):
        yield replace(owner, "has_torch_function", partial(_asking, lambda values: values))
        yield replace(owner, "has_torch_function_unary", partial(_asking, lambda value: (value,)))
        yield replace(owner, "has_torch_function_variadic", partial(_asking, lambda *values: values))
    yield replace(torch.jit._builtins, "_find_builtin",
                  lambda f: lambda function: f(getattr(function, "in_place_of", function)))
    # Optimizers and clip_grad_norm_ take the foreach path for these types only; plain CUDA parameters do.
    for module in (sys.modules["torch.optim.optimizer"], torch.utils._foreach_utils):  # torch.optim deletes the name
        types = module._foreach_supported_types
        undo = partial(types.remove, MetaTensor)  # each undo is there before what it undoes
        types.append(MetaTensor)
        yield undo
    yield answer(torch._C, "_group_tensors_by_device_and_dtype", _group_by_device)
    yield answer(torch.nn.init, "_no_grad_trunc_normal_", _fill_normal)
    for owner, name in itertools.product((torch, torch.random), ("manual_seed", "seed", "set_rng_state")):
        yield answer(owner, name, _move_generator, passes_original=True)
    yield answer(torch.autograd, "_engine_run_backward", _run_with_mode, passes_original=True)
    yield replace(torch.Tensor, "_make_wrapper_subclass", _on_meta)
    yield replace(MetaTensor, "__torch_function__", lambda f: torch._C._disabled_torch_function_impl)
    yield replace(sys, "unraisablehook", _note_failure)
    yield from _higher_order_operators()
    yield supply(torch._compile, "getattr", _get_without_dynamo)
    yield _run_compiled
    _run_eagerly()
    yield answer(builtins, "print", _print, passes_original=True, where=lambda: getattr(current(), "tracing", None))
    yield replace(torch.autograd.Function, "apply", _applying)
    yield answer(torch, "compile", _compile, passes_original=True)
    for name in ("is_compiling", "is_dynamo_compiling"):
        yield answer(torch.compiler, name, _is_compiling, passes_original=True)
    yield answer(proxy_tensor.ProxyTorchDispatchMode, "__enter__", _refuse_graph)
    yield replace(threading.Thread, "start", _starting)
    yield replace(ThreadPoolExecutor, "submit", _submitting)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
        yield replace(ThreadPool, name, _submitting)
    for name, run in (("cond", _cond), ("while_loop", _while), ("scan", _scan), (
            "map_impl", lambda op, function, xs, others: _scan(op, function, (), xs, others))):
        yield answer(type(getattr(torch.ops.higher_order, name)), "__call__", run)
    for device in devices:
        yield from device.replacements()


def _refuse_graph(mode: Any) -> None:
    raise InputError("torch makes a graph of its own of what runs (torch.func.linearize, make_fx), which needs tensors "
                     f"with data, {active_state().where()}. Call torch.func.jvp in place of linearize; make graphs "
                     "before, and give them as modules")


def _move_generator(original: Any, *args: Any, **kwargs: Any) -> Any:
    active.generator_moves += 1
    return original(*args, **kwargs)


def _fill_normal(tensor: torch.Tensor, mean: float, std: float, a: float, b: float,
                 generator: Any = None) -> torch.Tensor:
    """Torch redraws values until none is outside the bounds, which needs data; without any, it draws once."""
    with torch.no_grad():
        return tensor.normal_(mean, std)


def _run_with_mode(original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch takes the function mode off; zeros for outputs without a gradient, which C++ makes, are where these are."""
    with torch._C.DisableTorchFunction():
        device = next((device_of(t) for t in outputs if isinstance(t, torch.Tensor)), None)
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    without_compiler: AbstractContextManager[Any] = nullcontext()
    if compiler is not None and compiler.compiled_autograd_enabled:
        active_state().assume("compiled autograd is not followed: each backward graph runs by itself, as without it")
        without_compiler = compiler._disable()
    with without_compiler, mode_in_force(), active_state().meaning(device):
        return original(outputs, *args, **kwargs)


def _note_failure(original: Any) -> Any:
    """Python prints what a finaliser raises, and goes on."""
    def hook(unraisable: Any) -> None:
        state = current()
        if state is None or unraisable.object is not MetaStorage.__del__:
            original(unraisable)
        elif state.failure is None:
            state.failure = (unraisable.exc_value or unraisable.exc_type()).with_traceback(None)
    return hook


def _on_meta(original: Any) -> Any:
    """A tensor around tensors is where they are: autograd ends the process for an accelerator that is not there."""
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            args = tuple(META if isinstance(a, torch.device) and a.type != "cpu" else a for a in args)
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
                kwargs["device"] = META
        return original(cls, *args, **kwargs)
    return staticmethod(make)


def _group_by_device(tensorlistlist: Any, with_indices: bool = False) -> Any:
    members: dict[Any, list[int]] = {}
    with torch._C.DisableTorchFunction():
        # as torch/csrc/utils/tensor_list... : the first list decides, the others follow its order
        for i, first in enumerate(tensorlistlist[0]):
            members.setdefault((device_of(first), first.dtype), []).append(i)
    return {key: ([[source[i] for i in indices] if source else [] for source in tensorlistlist],
                  indices if with_indices else []) for key, indices in members.items()}


def _higher_order_operators() -> Iterator[Undo]:
    """They find their kernel in Python, by the highest key set: let them fall through the mode's as autocast's."""
    defaults, keys = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, gate_keys()
    added = [key for key in keys if key not in defaults]
    def put_back() -> None:
        defaults[:] = [key for key in defaults if key not in added]
    yield put_back
    defaults.extend(added)  # for those that are defined while the mode is active
    for operator in list(torch._ops._higher_order_ops.values()):
        yield partial(setattr, operator, "non_fallthrough_keys", operator.non_fallthrough_keys)
        for key in keys:
            operator.fallthrough(key)


def _get_without_dynamo(function: Any, name: str, *default: Any) -> Any:
    """``getattr`` for ``torch._compile``, which asks what is not to be compiled for ``__dynamo_disable`` and imports
    the compiler, slower than most profiles, to make it: until something else has, the function itself will do.
    """
    if name == "__dynamo_disable" and "torch._dynamo" not in sys.modules and current() is not None:
        return function
    return getattr(function, name, *default)


# Functions under torch.compile. Dynamo would look into frames of code that runs under the mode, and a compiler that
# sees tensors without data ends the process. So compiled functions are called as they were written, and the mode's own
# compiler (`MetaState.compile`) gets the call.

_compiled: list[Undo] = []  # what lets functions that are compiled run so again
_DYNAMO = "torch._dynamo.eval_frame"


def _run_eagerly() -> None:
    """Keep Dynamo from looking at frames; each function is given to the mode's compiler where it is first called."""
    if not _compiled and _DYNAMO in sys.modules:
        _compiled.append(replace(sys.modules[_DYNAMO], "_callback_from_stance", _redirecting))
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
    is_compiled = frame.f_code.co_name == "compile_wrapper"
    if isinstance(function, (_CompiledCall, _DisabledCall)) or not is_compiled and (
            getattr(function, "__module__", None) or "").startswith("torch."):
        return
    for wrapper in gc.get_referrers(frame.f_code):  # a frame does not tell its function
        if getattr(wrapper, "_torchdynamo_orig_callable", None) is function and wrapper.__code__ is frame.f_code:
            cell = wrapper.__closure__[frame.f_code.co_freevars.index("fn")]
            _compiled.append(partial(setattr, cell, "cell_contents", function))
            settings = compiler_settings(frame.f_locals["self"])
            cell.cell_contents = _DisabledCall(function) if settings is None else _CompiledCall(function, settings)


def compiler_settings(context: Any) -> dict[str, Any] | None:
    """How Dynamo's ``context`` compiles what it is around, as far as the user said it: the backend, ``fullgraph``,
    ``dynamic`` and Inductor's options by name; None where it keeps the compiler out.
    """
    frames: Any = sys.modules[_DYNAMO]
    if isinstance(context, frames.DisableContext):
        return None
    backend = frames.innermost_backend(context.callback)
    found = {"backend": getattr(backend, "compiler_name", getattr(backend, "__name__", str(backend)))}
    if context.fullgraph:
        found["fullgraph"] = True
    if context._dynamic is not None:
        found["dynamic"] = context._dynamic
    return {**found, **getattr(backend, "config", {})}


def settings_of_module(module: torch.nn.Module) -> dict[str, Any] | None:
    """How a module under torch.compile is compiled, or one of `torch.compiler.disable`, for which it is None."""
    call = module.__dict__.get("_compiled_call_impl")
    context = module.dynamo_ctx if call is None else inspect.getclosurevars(call.get_compiler_config).nonlocals["self"]
    return compiler_settings(context)


class _CompiledCall:
    """Calls a function as the mode's compiler compiles it; as it is where no mode is, or the user wants it so."""

    def __init__(self, function: Any, config: dict[str, Any]) -> None:
        self.function, self.config = function, config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = current()
        frames: Any = sys.modules[_DYNAMO]
        if state is None or frames._stance.stance == "force_eager":
            return self.function(*args, **kwargs)
        if self.config.get("fullgraph"):
            frames.set_fullgraph_compiled_frame_count(-1)  # for afterwards torch asks whether Dynamo compiled any
        module = getattr(self.function, "__self__", None)
        if module is None and isinstance(around := getattr(self.function, "__wrapped__", None), torch.nn.Module):
            module = None if module_behind(around) in (None, around) else around  # wrap_inline(module) of Dynamo's
        if isinstance(module, torch.nn.Module) and self.function.__name__ != "forward":
            with compiling_forward(state, module, self.config):
                return self.function(*args, **kwargs)
        return state.compile(self.function, args, kwargs, self.config)


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
    return value.function if isinstance(value, (_CompiledCall, _DisabledCall)) else value


def outside_of_graph(reason: str) -> AbstractContextManager[None]:
    """A block in which what is called runs as it is written, also where a compiled function calls it."""
    state = current()
    if state is None or state.tracing is None:
        return nullcontext()
    return state.tracing.outside(reason)  # type: ignore[no-any-return]


def _break_graph(msg: str = "") -> None:
    state = current()
    assert state is not None
    if state.tracing is not None and is_called_by_user():
        with state.tracing.outside(f"torch._dynamo.graph_break({msg!r})" if msg else "torch._dynamo.graph_break()"):
            pass


def _print(original: Any, *args: Any, **kwargs: Any) -> None:
    with outside_of_graph("print is called"):
        original(*args, **kwargs)


def _applying(original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.tracing is None or cls.__module__.startswith("analyzer."):
            return original.__func__(cls, *args, **kwargs)
        return state.tracing.dispatch(cls.apply, args, kwargs, lambda function, a, k: original.__func__(cls, *a, **k))
    return classmethod(apply)


def compiled_from(function: Any) -> tuple[Any, ...] | None:
    """Of what torch.compile gives for a function: that function, and how it is compiled; None for another one."""
    if not hasattr(function, "_torchdynamo_orig_callable") or not hasattr(function, "get_compiler_config"):
        return None
    context = inspect.getclosurevars(function.get_compiler_config).nonlocals["self"]
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    return (function._torchdynamo_orig_callable, frames.innermost_backend(context.callback), context.fullgraph,
            context._dynamic, context.compiler_config)


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
def compiling_forward(state: MetaState, module: torch.nn.Module, config: dict[str, Any]) -> Iterator[None]:
    """A block in which the forward of a compiled ``module`` is compiled. Its hooks are outside of the graph, as are
    those of FSDP: Dynamo skips the frame of ``Module._call_impl`` (torch/_dynamo/trace_rules.py) and looks at forward.
    """
    while (behind := module_behind(module)) not in (None, module):
        assert behind is not None
        module = behind
    attributes, forward = object.__getattribute__(module, "__dict__"), module.forward  # of which no watch is told
    before = attributes.get("forward")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return state.compile(forward, args, kwargs, config)

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


def _is_compiling(original: Any) -> bool:
    return active_state().graph is not None or original()


_Function = Callable[..., Any]
_Tensors = Sequence[Any]


def _cond(op: Any, pred: Any, true_fn: _Function, false_fn: _Function, operands: _Tensors) -> Any:
    state = current()
    if state is not None and torch.is_grad_enabled():
        state.assume("torch.cond: weights that only the other branch uses get no gradient, where torch gives zeros, "
                     f"{state.where()}")
    return true_fn(*operands) if pred else false_fn(*operands)


def _while(op: Any, cond_fn: _Function, body_fn: _Function, carried_inputs: _Tensors, additional_inputs: _Tensors,
           **options: Any) -> Any:
    while cond_fn(*carried_inputs, *additional_inputs):
        carried_inputs = body_fn(*carried_inputs, *additional_inputs)
    return tuple(carried_inputs)


def _scan(op: Any, combine_fn: _Function, init: _Tensors, xs: _Tensors, additional_inputs: _Tensors) -> Any:
    carried, outputs = list(init), []
    for slices in zip(*(x.unbind() for x in xs)):
        result = combine_fn(*carried, *slices, *additional_inputs)
        carried = result[:len(init)]
        outputs.append(result[len(init):])
    return [*carried, *map(torch.stack, zip(*outputs))]


# Threads that a forward starts are not under the mode: what they would do with fake tensors is refused.

_STARTERS = (threading.__file__, *(path + os.sep for m in (concurrent, multiprocessing) for path in m.__path__))


def _starting(original: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        state = current()
        if state is not None and not state.space.is_shared:  # in which other threads take part
            guard, run = _Guard(state, (thread._args, thread._kwargs)), thread.run  # type: ignore[attr-defined]
            def guarded() -> None:
                try:
                    with guard:
                        run()
                except InputError as error:
                    if error is not guard.failure:  # of which the thread that runs forward tells
                        raise
            thread.run = guarded  # type: ignore[method-assign]
        original(thread)
    return start


def _submitting(original: Any) -> Any:
    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.space.is_shared:
            return original(pool, function, *args, **kwargs)
        guard = _Guard(state, (args, kwargs))
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with guard:
                return function(*args, **kwargs)
        return original(pool, guarded, *args, **kwargs)
    return submit


class _Guard(TorchFunctionMode):
    """Refuses torch functions of fake tensors in a thread, and such tensors among what the thread is ``given``."""

    def __init__(self, state: MetaState, given: Any) -> None:
        super().__init__()
        self.state = weakref.ref(state)  # which a pool's thread outlives
        frame = first_frame(lambda file: is_user_code(file) and not file.startswith(_STARTERS))
        self.place = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        self.failure: InputError | None = None
        self._check("gives tensors to", given)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if active.dispatch_mode is None and type(func) is not MethodWrapperType:  # which reads an attribute
            self._check(f"runs {torch.overrides.resolve_name(func) or func} in", (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _check(self, does: str, given: Any) -> None:
        state = self.state()
        if state is None or state.recorder is None and state.tape is None or not any(
                isinstance(value, MetaTensor) for value in tree_leaves(given)):
            return
        self.failure = InputError(f"forward {does} a thread that it starts{self.place}. Threads are not followed: run "
                                  "this in the thread of forward")
        state.failure = state.failure or self.failure
        raise self.failure


mode_replacements = SharedReplacements(_replacements)
