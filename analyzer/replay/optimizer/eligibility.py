"""Whether an optimizer's steps can be known beforehand."""
from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from analyzer.meta.plain_type import LITERALS
from analyzer.record.optimizer_step import TORCHS_OWN, has_step_hooks


def why_run(owner: Any) -> str | None:
    """Why ``owner.optimizer`` has to run: its code is unknown, or its states could be read; None if neither."""
    reason = why_unknown(owner.optimizer)
    if reason is None and not _is_sole_owner(owner):
        return "its states could be read: it is held outside of the profiler"
    return reason


def why_unknown(optimizer: torch.optim.Optimizer) -> str | None:
    """Why what its steps do cannot be known beforehand; None where it can."""
    if type(optimizer) not in TORCHS_OWN:
        return "it is no optimizer of torch.optim"
    if optimizer.state:
        return "it has states before its first step"
    if has_step_hooks(optimizer):
        return "hooks run with its step"
    if any(callable(value) or isinstance(value, torch.Tensor) for value in vars(optimizer).values()):
        return "its step is replaced, or it holds a tensor"  # as the scale of a GradScaler
    settings = [
        value for group in optimizer.param_groups for name, value in group.items()
        if name not in ("params", "param_names")
    ]
    if not all(isinstance(x, LITERALS) for value in settings for x in (value if type(value) is tuple else (value,))):
        return "one of its settings is no plain value"
    return None


def _is_sole_owner(owner: Any) -> bool:
    """Whether nothing besides ``owner`` holds its optimizer, and the optimizer's states."""
    return (_count_holders(owner, "optimizer") == _count_holders(_EXAMPLE, "held") == _count_holders(
        owner.optimizer, "state") and not weakref.getweakrefcount(owner.optimizer))


_EXAMPLE = SimpleNamespace(held=object())  # of which nothing else holds the object


def _count_holders(owner: Any, name: str) -> int:
    """The references to an attribute's value, with those of the count itself, which differ between Pythons."""
    return sys.getrefcount(getattr(owner, name))
