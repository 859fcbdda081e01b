"""What tells the tape what a forward does besides calling torch functions: operators of Python, modes, seeds, hooks."""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.attention
from torch.autograd import forward_ad, graph
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import BackwardHook, RemovableHandle

from analyzer.cuda.stream import simulated_class
from analyzer.errors import InputError
from analyzer.fx.fake_tensor import save_generators
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.source_line import is_user_code, user_line
from analyzer.meta.state import MetaState, active, current

from . import input_check
from .function_call import METHOD_OF, CallByName, NodeCall
from .outline import CallMethod
from .tape import Tape
from .tracer_impl import register_leaf_function, register_tracer_impl


def recording_tape() -> Tape | None:
    """The tape of this thread, if it writes down what is called now: under vmap, only what operators come out of it."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    state = current()
    tape = None if state is None else state.tape
    return tape if isinstance(tape, Tape) and not tape.paused else None


def while_recording(run: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes what takes the place of a function: ``run``, given the tape and the original, in a thread that records."""
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            tape = recording_tape()
            return original(*args, **kwargs) if tape is None else run(tape, original, *args, **kwargs)

        return call

    return make


def effect_replacements() -> Iterator[Undo]:
    """What tells the tape, but for functions that are searched for wherever they are held: see `mode_wrappers`."""
    for operator in METHOD_OF:
        yield replace(torch.Tensor, operator, while_recording(partial(_operate, operator)))
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        yield replace(functional, name, _tell)
    for block in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode):
        for name in ("__init__", "__enter__") if block is torch.set_grad_enabled else ("__enter__",):
            yield replace(block, name, while_recording(_set_grad))
        yield replace(block, "__exit__", while_recording(_reset_grad))
    for owner, name, function, note in _list_mode_functions():
        if _is_simulated(function):  # anew in each run, so that a search for what holds it would begin anew, too
            yield replace(owner, name, partial(_wrap, name=name, note=note))
    for path, owners, names in (("torch.random", (torch, torch.random), _STATES),
                                ("torch.cuda.random", (torch.cuda, torch.cuda.random), _STATES + _OF_ALL)):
        for name in names:
            for owner in owners:
                yield replace(owner, name, while_recording(partial(_control, f"{path}.{name}")))
    yield replace(torch, "Generator", lambda f: simulated_class(f, f, _refuse_generator))
    for kind in (RemovableHandle, graph._MultiHandle):
        yield replace(kind, "remove", while_recording(_remove))
    for name in ("setup_input_hook", "setup_output_hook"):
        yield replace(BackwardHook, name, while_recording(partial(_set_up, name)))
    for refused in (graph.saved_tensors_hooks, forward_ad.dual_level, TorchFunctionMode, TorchDispatchMode):
        yield replace(refused, "__enter__", while_recording(_refuse))


# Python's operators and the functions of torch.nn.functional become nodes of their own, as those of torch.fx are.
# Torch tells a function mode of ``x + y`` as of ``x.add(y)``, and of what a function of torch.nn.functional calls, not
# of the function itself. A proxy of torch.fx sees both, and patterns for graphs are traced with proxies.

def _operate(operator: str, tape: Tape, original: Any, tensor: torch.Tensor, *others: Any) -> Any:
    outer, tape.operator = tape.operator, operator
    try:
        return original(tensor, *others)
    finally:
        tape.operator = outer


def _tell(asks: Any) -> Any:
    """Whether a function is to be given to the function mode: always while its calls are written down."""
    def has_torch_function(*values: Any) -> bool:
        return recording_tape() is not None or bool(asks(*values))

    has_torch_function.in_place_of = getattr(asks, "in_place_of", asks)  # type: ignore[attr-defined]
    return has_torch_function


# Torch's modes around a forward: what it sets is in the graph, what it asks for is checked where the graph runs.

#: what Python code asks of the modes around it
_ASKED = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
          "is_autocast_cache_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype",
          "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled",
          "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode",
          "get_float32_matmul_precision")
#: what it sets without a block
_SET = ("set_autocast_enabled", "set_autocast_cpu_enabled", "set_autocast_dtype", "set_autocast_cpu_dtype",
        "set_autocast_gpu_dtype", "set_autocast_cache_enabled", "clear_autocast_cache", "set_default_dtype",
        "set_default_tensor_type", "use_deterministic_algorithms", "set_deterministic_debug_mode",
        "set_float32_matmul_precision")
#: what it chooses kernels with
_CHOICES = {torch.nn.attention: ("sdpa_kernel",), torch.backends.cudnn: ("flags",), torch.backends.mkldnn: ("flags",),
            torch.backends.cuda: ("sdp_kernel", "enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp",
                                  "enable_cudnn_sdp")}
_GRAD_MODE = inspect.getfile(torch.no_grad)


def _set_grad(tape: Tape, original: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
    caller = sys._getframe(2).f_code.co_filename
    if args and not is_user_code(caller) and caller != _GRAD_MODE:  # `Optimizer.step` sets it, and puts it back
        tape.regions.exchange_grad()
    else:
        tape.regions.set_grad(block)  # first: what one block does may be written with another
    return original(block, *args, **kwargs)


def _reset_grad(tape: Tape, original: Any, block: Any, *exc: Any) -> Any:
    result = original(block, *exc)
    tape.regions.reset_grad(block)
    return result


def mode_wrappers() -> dict[int, tuple[Any, Any]]:
    """Functions that ask for modes or set them, each with what tells the tape of calls, by id."""
    return {id(function): (function, _wrap(function, name, note)) for _, name, function, note in _list_mode_functions()
            if not _is_simulated(function)}


def _list_mode_functions() -> Iterator[tuple[Any, str, Any, Callable[..., None]]]:
    notes: dict[Callable[..., None], dict[Any, tuple[str, ...]]] = {
        _note_asked: {torch: _ASKED}, _note_set: {torch: _SET}, _note_choice: _CHOICES}
    for note, owners in notes.items():
        for owner, names in owners.items():
            yield from ((owner, name, getattr(owner, name), note) for name in names if hasattr(owner, name))


def _is_simulated(function: Any) -> bool:
    return str(getattr(function, "__module__", None)).startswith("analyzer.")


def _wrap(function: Any, name: str, note: Callable[..., None]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        told = function(*args, **kwargs)
        caller = sys._getframe(1).f_code.co_filename  # torch itself asks, too, which is no branch of the model's
        if (is_user_code(caller) or caller == input_check.__file__) and (tape := recording_tape()) is not None:
            note(tape, name, args, kwargs, told)
        return told

    return call


def _note_asked(tape: Tape, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], told: Any) -> None:
    args = (*args, *kwargs.values())
    regions = tape.regions
    if regions.is_set(name, args):
        return
    if name == "is_grad_enabled" and any(getattr(region, "use_reentrant", False) for region in regions.current()):
        raise InputError(f"forward asks for torch.is_grad_enabled() at {user_line()}, in a checkpoint that runs "
                         "without gradients first and with them again: give checkpoint(..., use_reentrant=False)")
    regions.asked.setdefault((name, args), (told, user_line()))


def _note_set(tape: Tape, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], told: Any) -> None:
    tape.regions.names_set.add(name)
    tape.create(NodeCall("call_function", CallByName(f"torch.{name}"), args, kwargs))


def _note_choice(tape: Tape, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], told: Any) -> None:
    tape.state.assume(f"forward chooses kernels by {name} at {user_line()}, which the graph does not: put the same "
                      "around calls of the graph")


# Random numbers: seeds and states that a forward sets by functions of torch are nodes.

_STATES = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
_OF_ALL = ("get_rng_state_all", "set_rng_state_all", "manual_seed_all", "seed_all")


def _control(path: str, tape: Tape, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, which torch has under the name ``path`` and which gives a state, a generator or a seed."""
    with tape.pause:
        result = original(*args, **kwargs)
    node = tape.create(NodeCall("call_function", CallByName(path), args, kwargs))
    if isinstance(result, torch.Generator):
        tape.map(result, node)
    elif isinstance(result, int):
        tape.state.assume(f"a random seed that forward asks for was {result} when traced and is a constant of the "
                          f"graph at {user_line()}")
    else:
        tape.bind(result, node)
    return result


def _refuse_generator(*args: Any, **kwargs: Any) -> bool:
    if recording_tape() is not None:
        raise InputError(f"forward makes a torch.Generator at {user_line()}, which a graph would not make anew in each "
                         "call. Hold one in the module, or call torch.manual_seed")
    return False


class RandomWatch:
    """Tells what a forward did to generators of random numbers that no node repeats."""

    def __init__(self, borrowed: Borrowed) -> None:
        self._held = [value for _, module in borrowed.walked for value in vars(module).values()
                      if type(value) is torch._C.Generator]
        self._moves, self._states = active.generator_moves, self._list_states()

    def _list_states(self) -> list[list[str]]:
        torchs, *others = save_generators()
        held = [str(generator.get_state().tolist()) for generator in self._held]
        return [held, [str(torchs.tolist())], *([repr(other)] for other in others)]

    def check(self, state: MetaState) -> None:
        """Raise InputError where forward sets a generator by a method of it; note draws outside of torch."""
        held, torchs, python, numpy = (a != b for a, b in zip(self._states, self._list_states()))
        if held or torchs and self._moves == active.generator_moves:
            what = "a torch.Generator that a module holds" if held else "torch.default_generator"
            raise InputError(f"forward sets {what} in a way that a graph does not repeat: by a method "
                             "of it, or by a function imported out of torch. Call torch.manual_seed or "
                             "torch.set_rng_state as such")
        for name, is_changed in (("Python", python), ("numpy", numpy)):
            if is_changed:
                state.assume(f"forward seeds {name}'s random numbers or draws some: what it drew is a constant of the "
                             "graph, which neither seeds nor draws them")


# Hooks of a forward on gradients are nodes; its hooks on what autograd saves, and modes of the user's, are refused.

def _remove(tape: Tape, original: Any, handle: Any) -> None:
    node = tape.find(handle)
    if node is not None:  # of a hook on gradients
        tape.call_method("remove", node)
    original(handle)


def _set_up(name: str, tape: Tape, original: Any, hook: Any, values: Any) -> Any:
    """A full backward hook of a module that is traced into gets at what the module is given, or gives."""
    if tape.find(hook) is None:
        given = [tape.to_argument(found) for found in (list(hook.user_hooks), list(hook.user_pre_hooks))]
        tape.map(hook, tape.call(CallMethod(BackwardHook), tape.module_node(hook.module), *given))
    with tape.pause:
        result = original(hook, values)
    tape.bind(result, tape.call_method(name, tape.find(hook), tape.to_argument(values)), rename=True)
    return result


def _refuse(tape: Tape, original: Any, block: Any) -> Any:
    if isinstance(block, graph.saved_tensors_hooks):
        raise InputError(f"forward changes what autograd saves, by {type(block).__name__} at {user_line()}, which a "
                         "graph does not repeat. Trace it without this block and put the block around calls of the "
                         "graph; set_saved(node, 'offload') of analyzer.fx sends what chosen nodes save to the host")
    if isinstance(block, forward_ad.dual_level):
        raise InputError(f"forward differentiates in forward mode by dual_level at {user_line()}, which a graph does "
                         "not repeat. Call torch.func.jvp or torch.func.jacfwd in its place, whose operators are nodes")
    if type(block).__module__.partition(".")[0] in ("torch", "analyzer"):
        return original(block)
    raise InputError(f"forward enters {type(block).__qualname__}, a mode of its own, at {user_line()}, which changes "
                     "what torch functions do and which a graph does not repeat. Trace it without this mode and put it "
                     "around calls of the graph")


class TracedNode:
    """An autograd node as forward sees it. It takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance(node, torch.autograd.graph.Node) asks
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise InputError(f"forward registers a hook on an autograd node at {user_line()}, which a graph does not "
                             "repeat. Register it on the tensor: Tensor.register_hook")
        found = getattr(self._node, name)
        return tuple((_show_node(node), number) for node, number in found) if name == "next_functions" else found


@functools.cache
def _class_like(kind: Any) -> Any:
    return type(kind.__name__, (TracedNode,), {"__module__": kind.__module__})


def _show_node(node: Any) -> TracedNode | None:
    kind: Any = type(node)
    return None if node is None else _class_like(kind)(node)


def _grad_fn(tensor: torch.Tensor, *kind: type) -> Any:
    return _show_node(tensor.grad_fn)


_GRAD_FN: Any = torch.Tensor.grad_fn  # the property itself
register_tracer_impl(_GRAD_FN.__get__, _grad_fn)
register_leaf_function(graph.register_multi_grad_hook)
