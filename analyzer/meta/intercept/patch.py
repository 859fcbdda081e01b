"""What is replaced in torch while a mode is active anywhere; threads without one get torch's own behaviour."""
from __future__ import annotations

import concurrent
import itertools
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from types import MethodWrapperType
from typing import Any

import torch
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
from analyzer.meta.copied_tensor import move_storage, reduce_tensor
from analyzer.meta.function.mode import answering
from analyzer.meta.simulated_device import devices, gate_keys
from analyzer.meta.source_line import first_frame, is_user_code
from analyzer.meta.state import MetaState, active, active_state, current, indexed_device, mode_in_force
from analyzer.meta.tensor import META, PLAIN_TENSORS, MetaTensor, device_of, use_on
from analyzer.meta.value.contents import read_known

from .compiled_function import compiler_replacements, without_compiled_autograd
from .legacy_type import legacy_replacements
from .mode_stack import find_context_device
from .program_mode import program_mode_replacements
from .replacement import Undo, answer, import_unreplaced, made_once, replace
from .shared_replacement import SharedReplacements


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


def _asked_function() -> MetaState | None:
    """The mode's state where its functions are asked: not with the modes, or torch functions, set aside."""
    return current() if torch._C._len_torch_function_stack() and torch._C._is_torch_function_enabled() else None


def _replacements() -> Iterator[Undo]:
    # Optimizers and clip_grad_norm_ take the foreach path for these types only; plain CUDA parameters do.
    for module in (sys.modules["torch.optim.optimizer"], torch.utils._foreach_utils):  # torch.optim deletes the name
        types = module._foreach_supported_types
        undo = partial(types.remove, MetaTensor)  # each undo is there before what it undoes
        types.append(MetaTensor)
        yield undo
    yield from _functions()
    # Dynamo's tables know torch's functions by their identity, and TorchScript compiles those of torch.optim there
    yield import_unreplaced("torch._dynamo", "torch.distributed.optim")
    yield from _higher_order_operators()
    yield from compiler_replacements()
    yield from legacy_replacements()
    yield from program_mode_replacements()
    for device in devices:
        yield from device.replacements()


@made_once
def _functions() -> Iterator[Undo]:
    for owner in (torch.nn.functional, torch.overrides):
        yield replace(owner, "has_torch_function", partial(_asking, lambda values: values))
        yield replace(owner, "has_torch_function_unary", partial(_asking, lambda value: (value,)))
        yield replace(owner, "has_torch_function_variadic", partial(_asking, lambda *values: values))
    yield replace(torch.jit._builtins, "_find_builtin",
                  lambda f: lambda function: f(getattr(function, "in_place_of", function)))
    yield answer(torch._C, "_group_tensors_by_device_and_dtype", _group_by_device)
    yield answer(torch.nn.init, "_no_grad_trunc_normal_", _fill_normal)
    for owner, name in itertools.product((torch, torch.random), ("manual_seed", "seed", "set_rng_state")):
        yield answer(owner, name, _move_generator, passes_original=True)
    yield answer(torch.autograd, "_engine_run_backward", _run_with_mode, passes_original=True)
    yield replace(torch.Tensor, "_make_wrapper_subclass", _on_meta)
    yield replace(torch.Tensor, "_make_subclass", _making_subclass)
    yield replace(torch.Tensor, "__new__", _constructing)
    yield answer(torch, "get_default_device", _default_device, passes_original=True)
    yield answer(torch._C._autograd, "_push_saved_tensors_default_hooks", _push_saved_tensors_hooks,
                 passes_original=True)
    yield answer(MetaTensor, "__repr__", torch.Tensor.__repr__, where=_asked_function)
    # C++ refuses a stream that is simulated before it asks a mode
    yield answer(torch.Tensor, "record_stream", _record_stream, passes_original=True)
    yield answer(torch.UntypedStorage, "to", move_storage, passes_original=True)
    yield answer(torch.Tensor, "__reduce_ex__", _reduce, passes_original=True)
    yield replace(MetaTensor, "__torch_function__", lambda f: torch._C._disabled_torch_function_impl)
    yield replace(sys, "unraisablehook", _note_failure)
    yield answer(proxy_tensor.ProxyTorchDispatchMode, "__enter__", _refuse_graph)
    yield replace(threading.Thread, "start", _starting)
    yield replace(ThreadPoolExecutor, "submit", _submitting)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
        yield replace(ThreadPool, name, _submitting)
    for name, run in (("cond", _cond), ("while_loop", _while), ("scan", _scan), (
            "map_impl", lambda op, function, xs, others: _scan(op, function, (), xs, others))):
        yield answer(type(getattr(torch.ops.higher_order, name)), "__call__", run)


def _refuse_graph(mode: Any) -> None:
    raise InputError("torch makes a graph of its own of what runs (torch.func.linearize, make_fx), which needs tensors "
                     f"with data, {active_state().where()}. Call torch.func.jvp in place of linearize; make graphs "
                     "before, and give them as modules")


def _move_generator(original: Any, *args: Any, **kwargs: Any) -> Any:
    active.generator_moves += 1
    return original(*map(_with_data, args), **{name: _with_data(value) for name, value in kwargs.items()})


def _with_data(value: Any) -> Any:
    """A generator's state that a file was read for; C++ refuses one on a device."""
    if not isinstance(value, torch.Tensor) or device_of(value).type != "cpu":
        return value
    known = read_known(value)
    return value if known is None else known


def _fill_normal(tensor: torch.Tensor, mean: float, std: float, a: float, b: float,
                 generator: Any = None) -> torch.Tensor:
    """Torch redraws values until none is outside the bounds, which needs data; without any, it draws once."""
    with torch.no_grad():
        return tensor.normal_(mean, std)


def _run_with_mode(original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch takes the function mode off; zeros for outputs without a gradient, which C++ makes, are where these are."""
    with torch._C.DisableTorchFunction():
        device = next((device_of(t) for t in outputs if isinstance(t, torch.Tensor)), None)
    try:
        with without_compiled_autograd(), mode_in_force(), active_state().meaning(device):
            return original(outputs, *args, **kwargs)
    except RuntimeError as error:
        if (leaf := _find_leaf_with_data(outputs)) is None:
            raise
        raise OutsideLeafError(leaf) from error


class OutsideLeafError(InputError):
    """A backward pass reaches ``leaf``, a tensor that requires a gradient and is none of the simulation."""

    def __init__(self, leaf: torch.Tensor) -> None:
        super().__init__(
            f"backward(): a tensor of shape {list(leaf.shape)} that requires a gradient was made outside of the mode "
            "and has data, so it can get no gradient without data. Build the model inside of `with MetaTensorMode():`, "
            "or give it to analyzer.profile(model, ...), which takes models as they are")
        self.leaf = leaf


def _find_leaf_with_data(outputs: Any) -> torch.Tensor | None:
    """A leaf of the outputs' graph that is no tensor of the simulation."""
    with torch._C.DisableTorchFunction():
        waiting = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not isinstance(
                    leaf.untyped_storage(), MetaStorage):
                return leaf
            waiting += [following for following, _ in node.next_functions]
    return None


def _note_failure(original: Any) -> Any:
    """Python prints what a finaliser raises, and goes on."""
    def hook(unraisable: Any) -> None:
        state = current()
        if state is None or unraisable.object is not MetaStorage.__del__:
            original(unraisable)
        elif state.failure is None:
            state.failure = (unraisable.exc_value or unraisable.exc_type()).with_traceback(None)
    return hook


def _record_stream(original: Any, tensor: torch.Tensor, stream: Any) -> None:
    (use_on if isinstance(tensor, MetaTensor) else original)(tensor, stream)


def _reduce(original: Any, tensor: torch.Tensor, protocol: Any) -> Any:
    """What is pickled of a plain tensor, for which PyTorch asks no mode (``__reduce_ex__`` in torch/_tensor.py)."""
    is_fake = type(tensor) is torch.Tensor and isinstance(tensor, MetaTensor)
    return reduce_tensor(tensor, protocol) if is_fake else original(tensor, protocol)


def _on_meta(original: Any) -> Any:
    """A tensor around tensors is where they are: autograd ends the process for an accelerator that is not there."""
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            args = tuple(META if isinstance(a, torch.device) and a.type != "cpu" else a for a in args)
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
                kwargs["device"] = META
        return original(cls, *args, **kwargs)
    return staticmethod(make)


def _making_subclass(original: Any) -> Any:
    """A parameter of a plain tensor: C++ asks no mode, so that a tape would not see what it is made of."""
    def make(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        state = current()
        if state is None or state.tape is None or type(data) not in PLAIN_TENSORS or not isinstance(data, MetaTensor):
            return original(cls, data, require_grad, **options)
        made = data.detach().requires_grad_(require_grad)
        made.__class__ = cls
        return made
    return staticmethod(make)


def _push_saved_tensors_hooks(original: Any, pack: Any, unpack: Any) -> Any:
    return original(answering(pack), unpack)


def _default_device(original: Callable[[], torch.device]) -> torch.device:
    """As ``torch.get_default_device``, which makes a tensor to learn the index of one that was given without."""
    device = find_context_device()
    return original() if device is None else indexed_device(device)


def _constructing(original: Any) -> Any:
    """A subclass without a constructor of its own: C++ would make it of a tensor that has a Python object already
    (`THPVariable_NewWithVar` in torch/csrc/autograd/python_variable.cpp).
    """
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or issubclass(MetaTensor, cls):
            return original(cls, *args, **kwargs)

        def construct(cls: Any, args: Any, kwargs: Any) -> Any:
            return torch.Tensor(*args, **kwargs).as_subclass(cls)

        is_one_call = state.tape is not None and cls.__new__ is torch.Tensor.__new__
        return state.tape.run(cls, args, kwargs, construct) if is_one_call else construct(cls, args, kwargs)
    return staticmethod(new)


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
    def submit(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.space.is_shared:
            return original(pool, *args, **kwargs)
        # the first argument, which methods of `ThreadPool` also take by its name
        function, *others = args or (kwargs.pop("func"),)
        guard = _Guard(state, (others, kwargs))
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with guard:
                return function(*args, **kwargs)
        return original(pool, guarded, *others, **kwargs)
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
