"""Torch's modes around a forward: what it sets is in the graph, what it asks for is checked where the graph runs."""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.source_line import is_user_code, user_line

from . import input_check
from .function_call import CallByName, NodeCall
from .recording import recording_tape, while_recording
from .tape import Tape

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


def grad_replacements() -> Iterator[Undo]:
    """What tells the tape of blocks that set the grad mode."""
    for block in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode):
        for name in ("__init__", "__enter__") if block is torch.set_grad_enabled else ("__enter__",):
            yield replace(block, name, while_recording(_set_grad))
        yield replace(block, "__exit__", while_recording(_reset_grad))


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
    return {id(function): (function, _wrap(function, name, note)) for _, name, function, note in _list_functions()
            if not _is_simulated(function)}


def mode_replacements() -> Iterator[Undo]:
    """What tells the tape of calls of those that the simulation has replaced: anew in each run, so that a search for
    what holds them would begin anew, too.
    """
    for owner, name, function, note in _list_functions():
        if _is_simulated(function):
            yield replace(owner, name, functools.partial(_wrap, name=name, note=note))


def _list_functions() -> Iterator[tuple[Any, str, Any, Callable[..., None]]]:
    """What holds a function, its name there, itself, and what notes calls of it."""
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
