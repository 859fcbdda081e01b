"""Private torch API: which tensors Python code holds, what they hold inside, and hooks on what autograd saves."""
from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import without_modes

Tensor = torch.Tensor
Hooks = list[tuple[Any, Any]]


def exchange(one: Tensor, other: Tensor) -> None:
    """Two Python objects change the C++ tensors behind them: what holds an object finds the other tensor there."""
    torch._C._swap_tensor_impl(one, other)


def is_held(tensor: Tensor) -> bool:
    """Whether anything in Python refers to ``tensor`` beside one variable of the caller. To be asked without modes."""
    held = sys.getrefcount(tensor) - 3  # the caller's, the parameter, what getrefcount is given
    return held > (_reference_of_cpp() if tensor._use_count() > 1 else 0)  # type: ignore[attr-defined]


@functools.cache
def _reference_of_cpp() -> int:
    """How many references to its Python object a tensor has for being held in C++ too, which changed in torch 2.10."""
    with without_modes(), torch.enable_grad():
        tensor = torch.ones(1, requires_grad=True).clone()
        before = sys.getrefcount(tensor)
        saved = tensor.sin()
        found = sys.getrefcount(tensor) - before
        del saved
    return found


def take_saved_tensor_hooks() -> Hooks:
    """Take off the hooks on tensors that autograd saves (of checkpoints, offloading); the outermost is the first."""
    found: Hooks = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.insert(0, hooks)
    return found


def put_saved_tensor_hooks(hooks: Hooks) -> None:
    """Put hooks on, the outermost first."""
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs (vmap, grad), whose tensors are wrapped."""
    return bool(torch._C._functorch.get_dynamic_layer_stack_depth())
