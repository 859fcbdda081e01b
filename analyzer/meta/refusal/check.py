"""The check of a call before its kernel runs."""
from __future__ import annotations

from typing import Any

import torch

from . import creation, function, index, layer
from .dtype import check_dtype
from .overlap import UNTAGGED, check_in_place_result
from .rule import CONVERTING, check_converted, rules

_NAMESPACES = ("aten", "torch_nn")  #: the second of operators that `torch.nn` defines in Python
ROOMS = creation, function, index, layer  #: which fill the table


def check_call(op: torch._ops.OpOverload, name: str, device_type: str, args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch's kernel of a device raises for these arguments, of which kernels on meta raise nothing."""
    if op.namespace not in _NAMESPACES:
        return
    rule = rules.get(name)
    if rule is not None:
        rule(device_type, *args, **kwargs)
    if name in CONVERTING:
        check_converted(name, args, kwargs)
    if name.endswith("_") and (torch.Tag.pointwise in op.tags or name in UNTAGGED):
        check_in_place_result(name, args, kwargs)
    check_dtype(name, device_type, args, kwargs, torch.Tag.pointwise in op.tags)
