"""Tells a recorder of module calls and of the phases of a step, by replacing a few functions of torch for a while."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import Variable

from analyzer.meta.intercept.compiled_function import compiling_forward, module_behind, outside_of_graph
from analyzer.meta.intercept.replacement import Undo, made_once, replace
from analyzer.meta.intercept.shared_replacement import SharedReplacements
from analyzer.meta.state import current
from analyzer.output import hold_over_forks

from .optimizer_step import begin_compiled, describe_history, observed_steps
from .tensor_walk import local_part

_STAGES = "torch.distributed.pipelining.stage"
_BACKWARD_OF_STAGE = ("backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")
FAILED = object()  #: what a module's call gave that ended with an exception


@contextmanager
def listen(recorder: Any, *, is_simulated: bool = False) -> Iterator[None]:
    """Report to ``recorder``, a `Recorder`, what runs in its thread; torch is as it was afterwards. One that
    ``is_simulated`` is that of its thread's mode: the functions of torch are replaced once for all of these.
    """
    def hearing() -> Any:
        return recorder if recorder.hears() else None

    shared = _simulated if is_simulated else SharedReplacements(partial(_replacements, hearing))
    with shared.installed(), SharedReplacements(partial(_backward_of_stages, hearing)).installed(), observed_steps(
            *_optimizer_steps(recorder)):
        yield


def _replacements(hearing: Callable[[], Any]) -> Iterator[Undo]:
    """What is replaced for recorders: ``hearing()`` is the one that hears what this thread runs now, or None."""
    yield replace(torch.nn.Module, "__call__", _reporting_calls(hearing))
    yield replace(torch.autograd, "backward", _while_heard(hearing, _backward(create_graph_at=3)))
    yield replace(torch.autograd, "grad", _while_heard(hearing, _backward(create_graph_at=4)))
    yield replace(Variable, "_execution_engine", partial(_AutogradEngine, hearing))
    yield replace(torch.enable_grad, "__enter__", _while_heard(hearing, _counting_recomputation(+1)))
    yield replace(torch.enable_grad, "__exit__", _while_heard(hearing, _counting_recomputation(-1)))
    yield replace(torch.optim.Optimizer, "zero_grad", _while_heard(hearing, _during("zero_grad")))
    yield replace(torch.utils.checkpoint.CheckpointFunction, "apply", _while_heard(hearing, _checkpoint))


def _while_heard(hearing: Callable[[], Any], run: Callable[..., Any]) -> Any:
    """Makes what takes the place of a function: ``run``, given the recorder and the original, where one hears of it."""
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = hearing()
            return original(*args, **kwargs) if recorder is None else run(recorder, original, *args, **kwargs)
        return call
    return make


def _during(phase: str) -> Any:
    def run(recorder: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.memory.during(phase):
            result = original(*args, **kwargs)
        if phase == "backward":
            _tell_backward_ended(recorder)
        return result

    return run


def _tell_backward_ended(recorder: Any) -> None:
    for listener in recorder.run.listeners if recorder.run.phase != "backward" else ():
        listener.backward_ended()


def _backward(create_graph_at: int) -> Any:
    """A backward pass: what it computes is no recomputation, even where it runs inside one's block."""
    def run(recorder: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is not None and state.tracing is not None and state.tracing.is_transforming():
            return original(*args, **kwargs)  # a part of the graph
        calls = recorder.calls
        before = calls.recomputing, calls.creates_graph
        calls.recomputing = 0
        calls.creates_graph = bool(kwargs.get("create_graph", args[create_graph_at] if len(args) > create_graph_at
                                              else None))
        try:
            for listener in recorder.run.listeners if recorder.run.phase != "backward" else ():
                listener.backward_begins()
            with outside_of_graph("a backward pass runs inside"), recorder.memory.during("backward"):
                result = original(*args, **kwargs)
        finally:
            calls.recomputing, calls.creates_graph = before
        _tell_backward_ended(recorder)
        return result

    return run


class _AutogradEngine:
    """The engine of autograd, for who calls it without `torch.autograd.backward`, as Megatron-LM does where gradients
    have another shape than their outputs (megatron/core/pipeline_parallel/schedules.py, ``custom_backward``).
    """

    def __init__(self, hearing: Callable[[], Any], engine: Any) -> None:
        self._hearing, self._engine = hearing, engine

    @property
    def run_backward(self) -> Any:  # no frame of which is between torch's own caller and C++
        recorder = self._hearing()
        is_own = sys._getframe(1).f_code.co_name == "_engine_run_backward"
        return self._engine.run_backward if is_own or recorder is None else partial(self._run, recorder)

    @staticmethod
    def _run(recorder: Any, tensors: Any, grad_tensors: Any, keep_graph: bool, create_graph: bool, inputs: Any = (),
             **settings: Any) -> Any:
        private: Any = torch.autograd

        def engine(**_: Any) -> Any:
            return private._engine_run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, **settings)

        return _backward(3)(recorder, engine, create_graph=create_graph)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _counting_recomputation(change: int) -> Any:
    """Checkpointing, of whatever make, runs the forward pass again under ``enable_grad``."""
    def run(recorder: Any, original: Any, block: torch.enable_grad, *args: Any) -> Any:
        if recorder.run.phase == "backward":
            recorder.calls.recomputing = max(0, recorder.calls.recomputing + change)
        return original(block, *args)

    return run


def _checkpoint(recorder: Any, original: Any, function: Any, preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint is a function of autograd that runs a block in backward: a skipped block needs none."""
    skipper, module = recorder.modules.skipper, _called_module(function)
    if skipper is not None and module is not None:
        with torch._C.DisableTorchFunction():
            is_skipped = skipper.will_skip(module, args)
        if is_skipped:
            return function(*args)
    return original(function, preserve, *args)


def _called_module(function: Any) -> torch.nn.Module | None:
    """The module that ``function`` is, or is the ``__call__`` of, as it stands or with arguments given before; None of
    what else may call one.
    """
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType) and function.__name__ == "__call__":
        function = function.__self__
    return function if isinstance(function, torch.nn.Module) else None


def _backward_of_stages(hearing: Callable[[], Any]) -> Iterator[Undo]:
    """What a stage of a pipeline does beside the engine is backward too: sums of gradients, and what FSDP reduces."""
    stage = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    for name in _BACKWARD_OF_STAGE:
        if hasattr(stage, name):
            yield replace(stage, name, _while_heard(hearing, _during("backward")))


def _reporting_calls(hearing: Callable[[], Any]) -> Any:
    """What takes the place of ``Module.__call__``: it reports each call, and skips a block that need not run."""
    def module_call(original: Any) -> Any:
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorder = hearing()
            if recorder is None:
                return original(module, *args, **kwargs)
            modules = recorder.modules
            with torch._C.DisableTorchFunction():  # what the recorder reads of tensors is no call of the user's
                token = modules.enter_module(module, args, kwargs)
            result: Any = FAILED
            try:
                impl = modules.find_leaf_impl(module)
                state = current()
                if modules.compiled and id(module) in modules.compiled and state is not None:
                    settings = modules.compiled[id(module)]
                    with (outside_of_graph("torch.compiler.disable keeps the compiler out of a module")
                          if settings is None else nullcontext() if state.graph is not None
                          else compiling_forward(state, module, settings, "_compiled_call_impl" not in vars(module))):
                        result = original(module, *args, **kwargs)
                    return result
                tracing = None if state is None else state.tracing
                if state is not None and tracing is not None and module_behind(module) is not None:
                    with (tracing.outside(f"{type(module).__name__} gathers parameters or gradients of other ranks"),
                          compiling_forward(state, module, tracing.config)):
                        result = original(module, *args, **kwargs)
                    return result
                if impl is None and modules.skipper is not None:
                    with torch._C.DisableTorchFunction():
                        result = modules.skipper.skip(module, args, kwargs)
                    if result is not NotImplemented:
                        return result
                result = original(module, *args, **kwargs) if impl is None else impl(module, *args, **kwargs)
                return result
            finally:
                with torch._C.DisableTorchFunction():
                    modules.leave_module(module, token, result)
        return __call__
    return module_call


_simulated = SharedReplacements(made_once(partial(_replacements, lambda: getattr(current(), "recorder", None))))
hold_over_forks(_simulated.lock)


def _optimizer_steps(recorder: Any) -> tuple[Callable[..., None], Callable[..., None], Callable[..., Any]]:
    """What is done before and after every optimizer's step, and what a step calls in place of a closure."""
    interrupted: list[str] = []

    def before(optimizer: Any) -> None:
        if recorder.hears():
            state = current()
            if state is not None and recorder.run.phase != "backward":
                recorder.check_optimizer(optimizer)
            interrupted.append(recorder.run.phase)
            with _between_graphs() as is_compiled:
                recorder.memory.begin("optimizer")
                if is_compiled:
                    begin_compiled(optimizer)

    def after(optimizer: Any) -> None:
        if recorder.hears():
            with _between_graphs():
                _end_step(recorder, optimizer, interrupted.pop(), bool(interrupted or recorder.outer_steps))

    def around(closure: Any) -> Any:
        def evaluate() -> Any:
            recorder.memory.begin("forward")
            try:
                return closure()
            finally:
                recorder.memory.resume("optimizer")

        return evaluate if recorder.hears() else closure

    return before, after, around


@contextmanager
def _between_graphs() -> Iterator[bool]:
    """A block in which another phase begins, with which a graph of a compiled function ends; whether one does."""
    state = current()
    if state is None or state.tracing is None:
        yield False
        return
    with state.tracing.between():
        yield True


def _end_step(recorder: Any, optimizer: Any, phase: str, is_inner: bool) -> None:
    """A step ended that interrupted ``phase``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        recorder.history = describe_history(optimizer)
    if phase == "backward" or recorder.has_own_steps:
        with torch._C.DisableTorchFunction():
            recorder.memory.mark_states(optimizer)
    if is_inner:  # it is the one inside another, which may communicate afterwards
        recorder.memory.resume("optimizer")
        return
    if phase == "backward":  # a hook on a parameter steps as soon as its gradient is there
        state, held = current(), (p for group in optimizer.param_groups for p in group["params"])
        if state is not None and any(recorder.memory.storage_of(local_part(p)) is None for p in held):
            state.assume(f"the {type(optimizer).__name__} that a hook on a parameter steps does not have the "
                         "parameters of the profiled model: its updates are not counted")
    recorder.memory.resume(phase if phase == "backward" else "forward")
