"""What is replaced in torch, and in the user's modules, while any thread traces; other threads get what was there."""
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.amp import autocast_mode
from torch.utils._pytree import tree_map_only

from analyzer.cuda.kernels.attention import FlexAttention
from analyzer.meta.function.answer import MoveDevice
from analyzer.meta.function.mode import Opaque, call_opaque
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.intercept.shared_replacement import SharedReplacements
from analyzer.meta.operator_info import register_shape_impl
from analyzer.meta.tensor import MetaTensor

from .effect_patch import effect_replacements, mode_wrappers, recording_tape, while_recording
from .function_call import ApplyFunction, CallTarget
from .outline import Site, module_site, outline_functions
from .tape import Tape
from .tracer_impl import find_leaf_impl, register_leaf_function, register_tracer_impl

_checkpoint = torch.utils.checkpoint
#: What runs a checkpoint that is not reentrant: from torch 2.14 on the other name is kept for other packages alone.
CHECKPOINT_GENERATOR = next(name for name in ("_checkpoint_without_reentrant_generator_impl",
                                              "_checkpoint_without_reentrant_generator") if hasattr(_checkpoint, name))


@contextmanager
def tracing_patches(outlined: Iterable[Site]) -> Iterator[None]:
    """Count one more tracing thread; the first replaces, the last puts back. Replaces ``outlined`` for this trace."""
    with _shared.installed(), SharedReplacements(lambda: outline_functions(outlined, _call_outlined)).installed():
        yield


def _call_outlined(site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tape = recording_tape()
    if tape is None or site not in tape.outlined:
        return function(*args, **kwargs)
    return tape.run_outlined(site, function, args, kwargs)


def _replace(owner: Any, name: str, value: Any) -> Undo:
    undo = functools.partial(setattr, owner, name, vars(owner)[name])  # a class method comes back as it was
    setattr(owner, name, value)
    return undo


def _replacements() -> Iterator[Undo]:
    yield replace(nn.Module, "__call__", _call_module)
    for kind in (MetaTensor, nn.Parameter):  # neither of which asks the mode, as Tensor.__deepcopy__ does
        yield replace(kind, "__deepcopy__", while_recording(_deepcopy))
    yield _replace(torch.autograd.Function, "apply",
                   classmethod(_apply_function(torch.autograd.Function.__dict__["apply"])))
    yield _replace(_checkpoint, CHECKPOINT_GENERATOR, _checkpoint_generator(getattr(_checkpoint, CHECKPOINT_GENERATOR)))
    # one node: TorchScript may differentiate it on its own, which the operators that come out of it do not show
    yield _replace(torch.jit.ScriptFunction, "__call__", while_recording(
        lambda tape, original, function, *args, **kwargs: tape.run_leaf(
            "call_function", CallTarget(function), args, kwargs, lambda a, k: original(function, *a, **k)))(
                torch.jit.ScriptFunction.__call__))
    yield replace(autocast_mode.autocast, "__enter__", _enter_autocast)
    yield replace(autocast_mode.autocast, "__exit__", _exit_autocast)
    yield from effect_replacements()
    if torch.distributed.is_available() and not hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):
        # before torch 2.11 no operator wraps what a functional collective returns: it is waited for, as in torch's own
        from torch.distributed import _functional_collectives as collectives
        yield replace(collectives, "_maybe_wrap_tensor", while_recording(
            lambda tape, wrap, tensor: collectives.wait_tensor(tensor)))
    yield from _function_replacements()


@while_recording
def _call_module(tape: Tape, original: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    path = tape.borrowed.modules.get(id(module))
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    site = module_site(module, tape.borrowed) if tape.outlined else None
    # whether forward builds it of tensors that were made by calls that are written down
    holds_results = path is None and any(tape.find(t) is not None for t in (*module.parameters(), *module.buffers()))
    outlined = site is not None and site in tape.outlined
    if module is tape.borrowed.root or not outlined and (holds_results or not tape.is_leaf(module)):
        with tape.module(path if path is not None else f"{tape.where()}.<{type(module).__name__}>".lstrip("."), kind):
            return original(module, *args, **kwargs)
    target = tape.module_target(module)
    impl = find_leaf_impl(module)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original(module, *args, **kwargs) if impl is None else impl(module, *args, **kwargs)

    with tape.module(target, kind):
        if site is not None and outlined:
            return tape.run_outlined(site, functools.partial(original, module), args, kwargs, module)
        return tape.run_leaf("call_module", target, args, kwargs, run, module)


def _deepcopy(tape: Tape, original: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = tape.run_leaf("call_function", copy.deepcopy, (tensor,), {}, lambda a, k: original(*a, {}))
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _apply_function(original: Any) -> Any:
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        real = original.__get__(None, cls)
        tape = recording_tape()
        if tape is None:
            return real(*args, **kwargs)
        if cls is _checkpoint.CheckpointFunction:
            return _run_reentrant(tape, args[0], args[1], args[2:])
        if cls in (MoveDevice, Opaque):  # ours
            with tape.pause:
                result = real(*args, **kwargs)
            tape.follow(args, result)
            return result
        if cls is FlexAttention:  # of a compiled function, which holds what is not replaced
            operands = (*args[:7], args[8:], args[7])
            return tape.run_leaf("call_function", CallTarget(torch.ops.higher_order.flex_attention), operands, {},
                                 lambda a, k: real(*a[:7], a[8], *a[7]))
        return tape.run_leaf("call_function", ApplyFunction(cls), args, kwargs, lambda a, k: real(*a, **k))

    return apply


def _run_reentrant(tape: Tape, function: Any, preserve_rng_state: bool, args: tuple[Any, ...]) -> Any:
    """A reentrant checkpoint: only a tensor that it returns, by itself or in a tuple, has a gradient."""
    tracks = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    # else the graph must do without gradients where it has no checkpoint that does
    runs_plainly = tracks or tape.regions.replays_checkpoints
    with tape.checkpoint(
            use_reentrant=True,
            preserve_rng_state=preserve_rng_state), contextlib.nullcontext() if runs_plainly else torch.no_grad():
        result = function(*args)
    if not tracks or isinstance(result, torch.Tensor):
        return result
    kept = [x for x in result if isinstance(x, torch.Tensor)] if isinstance(result, tuple) else []
    return tree_map_only(torch.Tensor, lambda t: t.detach() if t.requires_grad and not any(
        t is other for other in kept) else t, result)


def _checkpoint_generator(original: Any) -> Any:
    signature = inspect.signature(original)  # which is not that of every version

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        tape = recording_tape()
        if tape is None:
            yield from original(*args, **kwargs)
            return
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given.get("respect_saved_tensors_hooks") is not None:  # from torch 2.14 on
            tape.state.assume(
                f"respect_saved_tensors_hooks of a checkpoint in {tape.where()!r} is not part of the graph")
        context_fn = given["context_fn"]
        with tape.checkpoint(use_reentrant=False, preserve_rng_state=given["preserve_rng_state"],
                             determinism_check=given["determinism_check"], debug=given["debug"],
                             early_stop=given["early_stop"],
                             context_fn=None if context_fn is _checkpoint.noop_context_fn else context_fn):
            yield

    return generator


@while_recording
def _enter_autocast(tape: Tape, original: Any, block: Any) -> Any:
    tape.regions.enter_autocast(block.device, block.fast_dtype, block._enabled, block._cache_enabled)
    try:
        return original(block)  # last: nothing leaves a block whose ``__enter__`` failed
    except BaseException:
        tape.regions.exit_autocast()
        raise


@while_recording
def _exit_autocast(tape: Tape, original: Any, block: Any, *exc: Any) -> Any:
    tape.regions.exit_autocast()
    return original(block, *exc)


#: of torch.distributed, in place: Python functions that call a process group, each one node
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
                "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "reduce", "scatter", "gather",
                "all_to_all", "all_to_all_single", "barrier", "send", "recv")


def _function_replacements() -> Iterator[Undo]:
    wrappers: dict[int, tuple[Any, Any]] = {}
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    collectives = [getattr(distributed, name) for name in _COLLECTIVES if joined and hasattr(distributed, name)]
    for func in (*register_tracer_impl, *register_leaf_function, *register_shape_impl, *collectives):
        # the function mode sees calls of those of torch itself (not of torch.nn.functional: meta/intercept/patch.py)
        if isinstance(func, FunctionType) and func.__module__ not in (
                "torch", "torch.functional", "torch._tensor", "torch.autograd"):
            wrappers[id(func)] = func, _wrap(func)
    wrappers |= mode_wrappers()
    for names, held in _find_names(frozenset(wrappers)):
        yield _replace(names, held, wrappers[id(vars(names)[held])][1])
    for func, wrapper in wrappers.values():
        owner: Any = sys.modules.get(func.__module__)
        *classes, name = func.__qualname__.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        if isinstance(owner, type) and vars(owner).get(name) is func:
            yield _replace(owner, name, wrapper)


_LIBRARIES = (*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
              os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
#: by id, namespaces of libraries that hold none of the functions searched for last, and how many names there were
_clean: dict[int, tuple[dict[str, Any], int]] = {}
_searched: frozenset[int] = frozenset()


def _find_names(functions: frozenset[int]) -> Iterator[tuple[Any, str]]:
    """Modules and names that hold one of ``functions`` (ids); libraries are searched anew when their names change."""
    global _searched
    if functions != _searched:
        _searched = functions
        _clean.clear()
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or id(names) in seen:  # a script is there as __main__ and as __mp_main__
            continue
        seen.add(id(names))
        if (known := _clean.get(id(names))) is not None and known[1] == len(names):
            continue
        if not functions.isdisjoint(map(id, names.values())):
            yield from [(module, name) for name, value in names.items() if id(value) in functions]
            continue
        top = str(names.get("__name__")).partition(".")[0]
        # the parts of an extension have none
        file = names.get("__file__") or getattr(sys.modules.get(top), "__file__", None)
        if top in sys.builtin_module_names or str(file).startswith(_LIBRARIES):
            _clean[id(names)] = names, len(names)


def _wrap(func: Any) -> Any:
    traced = register_tracer_impl.find(func)
    leaf = register_leaf_function.find(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tape = recording_tape()
        if tape is None or func in tape.active_impls:
            return func(*args, **kwargs)
        if traced is not None:
            return tape.run_impl(func, traced, args, kwargs)
        return tape.run_leaf("call_function", func, args, kwargs, lambda a, k: (
            call_opaque(func, a, k) if func in register_shape_impl else (leaf or func)(*a, **k)))

    return wrapper


_shared = SharedReplacements(_replacements)
