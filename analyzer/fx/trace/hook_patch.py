"""Hooks of a forward on gradients are nodes; its hooks on what autograd saves, and modes of the user's, are refused."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad, graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import BackwardHook, RemovableHandle

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.source_line import user_line

from .function_call import NodeCall
from .outline import CallMethod
from .recording import recording_tape, while_recording
from .tape import Tape
from .tracer_impl import register_leaf_function, register_tracer_impl


def hook_replacements() -> Iterator[Undo]:
    """What tells the tape of hooks that are removed, and refuses blocks that a graph does not have."""
    for kind in (RemovableHandle, graph._MultiHandle):
        yield replace(kind, "remove", while_recording(_remove))
    for name in ("setup_input_hook", "setup_output_hook"):
        yield replace(BackwardHook, name, while_recording(partial(_set_up, name)))
    yield replace(graph.saved_tensors_hooks, "__enter__", while_recording(_refuse_saved_hooks))
    yield replace(forward_ad.dual_level, "__enter__", while_recording(_refuse_dual_level))
    for mode in (TorchFunctionMode, TorchDispatchMode):
        yield replace(mode, "__enter__", while_recording(_refuse_mode))


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


def _refuse_saved_hooks(tape: Tape, original: Any, block: Any) -> None:
    raise InputError(f"forward changes what autograd saves, by {type(block).__name__} at {user_line()}, which a graph "
                     "does not repeat. Trace it without this block and put the block around calls of the graph; "
                     "set_saved(node, 'offload') of analyzer.fx sends what chosen nodes save to the host")


def _refuse_dual_level(tape: Tape, original: Any, block: Any) -> None:
    raise InputError(f"forward differentiates in forward mode by dual_level at {user_line()}, which a graph does not "
                     "repeat. Call torch.func.jvp or torch.func.jacfwd in its place, whose operators are nodes")


def _refuse_mode(tape: Tape, original: Any, mode: Any) -> Any:
    if type(mode).__module__.partition(".")[0] in ("torch", "analyzer"):
        return original(mode)
    raise InputError(f"forward enters {type(mode).__qualname__}, a mode of its own, at {user_line()}, which changes "
                     "what torch functions do and which a graph does not repeat. Trace it without this mode and put it "
                     "around calls of the graph")


class TracedNode:
    """An autograd node as forward sees it, so that hooks which it registers there are written down.

    ``find`` writes down how the graph gets at the node.
    """

    def __init__(self, node: Any, find: Callable[[], fx.Node]) -> None:
        self._node, self._find = node, find

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance(node, torch.autograd.graph.Node) asks
        return type(self._node)

    @property
    def next_functions(self) -> tuple[tuple[TracedNode | None, int], ...]:
        """Where its gradients go."""
        return tuple((None if node is None else TracedNode(node, partial(self._find_next, i)), number)
                     for i, (node, number) in enumerate(self._node.next_functions))

    def _find_next(self, i: int) -> fx.Node:
        tape = recording_tape()
        assert tape is not None
        edge = tape.call(operator.getitem, tape.call(getattr, self._find(), "next_functions"), i)
        return tape.call(operator.getitem, edge, 0)

    def register_hook(self, hook: Any) -> Any:
        """``Node.register_hook``."""
        return self._register("register_hook", hook)

    def register_prehook(self, hook: Any) -> Any:
        """``Node.register_prehook``."""
        return self._register("register_prehook", hook)

    def _register(self, name: str, hook: Any) -> Any:
        tape = recording_tape()
        handle = getattr(self._node, name)(hook)
        if tape is not None:
            tape.bind(handle, tape.call_method(name, self._find(), tape.to_argument(hook)))
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _grad_fn(tensor: torch.Tensor, *kind: type) -> Any:
    """``tensor.grad_fn``."""
    node = tensor.grad_fn
    return None if node is None else TracedNode(node, partial(_find_node, tensor))


def _find_node(tensor: torch.Tensor) -> fx.Node:
    tape = recording_tape()
    assert tape is not None
    return tape.create(NodeCall("call_function", getattr, (tensor, "grad_fn"), {}))


_GRAD_FN: Any = torch.Tensor.grad_fn  # the property itself
register_tracer_impl(_GRAD_FN.__get__, _grad_fn)
register_leaf_function(graph.register_multi_grad_hook)
