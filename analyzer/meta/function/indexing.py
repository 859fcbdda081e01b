"""Parts of tensors that are read and written by Python's brackets."""
from __future__ import annotations

from typing import Any

import numpy
import torch

from analyzer.meta.state import MetaState
from analyzer.meta.tensor import device_of

from .creation import make_tensor
from .handler import handles

Tensor = torch.Tensor


@handles(Tensor.__getitem__, Tensor.__setitem__)
def _index(state: MetaState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[[0, 2]]``: C++ would make a tensor of the list where ``x`` really lives, and its contents would be lost."""
    x, index = args[0], args[1]
    if type(index) is list and not all(type(i) in (int, bool) for i in index):
        index = tuple(index)  # as treatSequenceAsTuple in torch/csrc/autograd/python_variable_indexing.cpp
    if type(index) in _SEQUENCES or type(index) is tuple and any(type(i) in (*_SEQUENCES, tuple) for i in index):
        device = device_of(x)
        made = _index_tensor(state, index, device) if type(index) is not tuple else tuple(
            _index_tensor(state, i, device) for i in index)
        args = (x, made, *args[2:])
    return func(*args, **kwargs)

_SEQUENCES = (list, numpy.ndarray)


def _index_tensor(state: MetaState, index: Any, device: torch.device) -> Any:
    if isinstance(index, numpy.ndarray):
        return _known(state, index, device) if index.dtype.kind in "iub" else index
    if type(index) not in (list, tuple) or not index:
        return index
    if _holds_numbers(index):
        return _known(state, index, device)
    if all(type(i) is int or isinstance(i, Tensor) and i.dim() == 0 for i in index):
        return torch.stack([i if isinstance(i, Tensor) else _known(state, i, device) for i in index])
    return index


def _holds_numbers(values: Any) -> bool:
    return all(type(v) in (int, bool) or type(v) in (list, tuple) and _holds_numbers(v) for v in values)


def _known(state: MetaState, data: Any, device: torch.device) -> Tensor:
    made: Tensor = make_tensor(state, torch.tensor, (data,), {"device": device})
    return made
