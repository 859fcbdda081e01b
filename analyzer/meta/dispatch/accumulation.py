"""Where autograd adds gradients in place on a real device. A tensor that several operators used gets the sum of their
gradients. The engine writes it into the one that it holds alone, unless that is ``isTensorSubclassLike``, which meta
tensors are: then it makes a new tensor, one more than a real device has in memory. Source:
``torch/csrc/autograd/input_buffer.cpp``, can_accumulate_inplace.
"""
from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

Tensor = torch.Tensor
_ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor
# Nodes whose own formula adds tensors, into a new one (torch/csrc/autograd/FunctionsManual.cpp,
# tools/autograd/derivatives.yaml).
_ADDING_NODES = ("VarMean", "StdMean", "Atan2", "Linalg", "Cumprod", "Prod", "Polar", "Svd")
_NORM = "LinalgVectorNormBackward"  # adds nothing: norm_backward

Holders = tuple[int, int, int]


def _count_holders(x: Tensor) -> Holders:
    """References to the C++ tensor, to its storage and to its Python object, those on the way here included."""
    storage = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    return x._use_count(), storage, sys.getrefcount(x)  # type: ignore[attr-defined]


_alone: list[Holders] = []  # what `_count_holders` gives for a first operand that only the engine holds


class _Learned(Exception):
    """Ends the backward pass of `learn_counts` before its sum runs, for which torch would import for seconds."""


def counts_are_known() -> bool:
    """Whether this process has learned its counts."""
    return bool(_alone)


def learn_counts() -> None:
    """Measure, once in the process and under the mode, what an operand that only the engine holds looks like."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(1, requires_grad=True).clone()
        grads = tuple(torch.empty(1, dtype=torch.float64) for _ in range(2))
        with suppress(_Learned):  # the first gradient, a cast, is the engine's own when the second comes
            _engine_run_backward((x.double(), x.double()), grads, False, False, (), allow_unreachable=True,
                                 accumulate_grad=True)


def is_engines_sum(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``__torch_dispatch__``, which must ask directly, got a call that the engine would make in place."""
    if func is not _ADD or torch.is_grad_enabled() or len(args) != 2:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name().startswith(_ADDING_NODES) and not node.name().startswith(_NORM):
        return False
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_engine_run_backward":  # hooks and functions written in Python add as they say
        return False
    old, new = args
    if not _alone:
        _alone.append(_count_holders(old))
        raise _Learned
    return (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
            and old.layout is torch.strided and new.layout is torch.strided
            and _count_holders(old) == _alone[0] and _is_dense(old))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` lie without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
