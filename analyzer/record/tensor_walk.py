"""The tensors that a value holds, and their specs."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.plain_type import LEAVES
from analyzer.meta.spec import TensorSpec, spec_of
from analyzer.meta.tensor import PLAIN_TENSORS


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    found: list[torch.Tensor] = []
    _collect_tensors(tree, found)
    return found


def _collect_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple, set, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            if type(x) not in LEAVES:
                _collect_tensors(x, found)
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            _collect_tensors(getattr(tree, name, None), found)


def local_part(tensor: Any) -> torch.Tensor:
    """What this process has of a tensor: the part of a DTensor, what a collective that is under way gives."""
    while type(tensor) not in PLAIN_TENSORS:
        # of torch.distributed.tensor.DTensor, and of AsyncCollectiveTensor in _functional_collectives.py
        inner = getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))
        if not isinstance(inner, torch.Tensor):
            break
        tensor = inner
    return tensor  # type: ignore[no-any-return]


def describe(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor of the mode's."""
    with torch._C.DisableTorchFunction():
        return spec_of(tensor)


def describe_tensors(tree: Any) -> tuple[TensorSpec, ...]:
    """The specs of all tensors in a nested structure."""
    with torch._C.DisableTorchFunction():
        return tuple([spec_of(local_part(t)) for t in tensors_in(tree)])
