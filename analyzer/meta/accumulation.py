"""Where autograd adds gradients in place on a real device.

A tensor that several operators used gets the sum of their gradients. The engine writes it into the one that it holds alone, unless
that is ``isTensorSubclassLike``, which meta tensors are: then it makes a new tensor, one more than a real device has in memory.
Source: ``torch/csrc/autograd/input_buffer.cpp``, can_accumulate_inplace.
"""
from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
_ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor
# Nodes whose own formula adds tensors (torch/csrc/autograd/FunctionsManual.cpp, tools/autograd/derivatives.yaml): those sums are new tensors.
_ADDING_NODES = ("VarMean", "StdMean", "Atan2", "Linalg", "Cumprod", "Prod", "Polar", "Svd")


def _count_holders(x: Tensor) -> tuple[int, int]:
    """References to the C++ tensor and to its storage, those on the way here included."""
    return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _holders_of_the_engines_own() -> tuple[int, int]:
    """What `_count_holders` gives in ``__torch_dispatch__`` for a sum's first operand that only the engine holds: measured once."""
    found: list[tuple[int, int]] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and torch._C._current_autograd_node() is not None:
                found.append(_count_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.empty(2, device="meta", requires_grad=True)
        y = x * 1
        loss = (y.exp() + y.sin()).sum()
        with Count():
            loss.backward()
    return found[-1]


def is_engines_sum(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call that ``__torch_dispatch__`` got is one that the engine would make in place. To be called by it directly."""
    if func is not _ADD or torch.is_grad_enabled() or len(args) != 2:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name().startswith(_ADDING_NODES):
        return False
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_engine_run_backward":  # hooks and functions written in Python add as they say
        return False
    old, new = args
    return (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
            and old.layout is torch.strided and new.layout is torch.strided
            and _count_holders(old) == _holders_of_the_engines_own() and _is_dense(old))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` lie without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
