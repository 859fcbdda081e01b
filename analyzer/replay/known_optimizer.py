"""Optimizers of torch's own, and who looks at one."""
from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from analyzer.record.recorder import Recorder, tensors_in
from analyzer.record.step_hook import has_step_hooks

# Optimizers whose code is known: what they do to a parameter depends on its specs and its group's settings, never on
# its size or on other parameters, and within a step no tensor changes its shape or gets another storage.
TORCHS_OWN = frozenset({
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD
})
_PLAIN = (bool, int, float, str, type(None))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's steps are those of torch's own code on plain settings, with no states yet."""
    if type(optimizer) not in TORCHS_OWN or optimizer.state or has_step_hooks(optimizer, known=1):
        return False
    # another `step`, or the scale of a GradScaler
    if any(callable(value) or isinstance(value, torch.Tensor) for value in vars(optimizer).values()):
        return False
    settings = [
        value for group in optimizer.param_groups for name, value in group.items()
        if name not in ("params", "param_names")
    ]
    return all(isinstance(x, _PLAIN) for value in settings for x in (value if type(value) is tuple else (value,)))


def is_sole_owner(owner: Any) -> bool:
    """Whether nobody besides ``owner`` holds its optimizer, and could look at its states."""
    return (_count_holders(owner, "optimizer") == _count_holders(_EXAMPLE, "held") == _count_holders(
        owner.optimizer, "state") and not weakref.getweakrefcount(owner.optimizer))


class _Example:
    """Holds an object of its own."""

    def __init__(self) -> None:
        self.held = object()


_EXAMPLE = _Example()


def _count_holders(owner: Any, name: str) -> int:
    """As Python counts the references to an attribute's value: those of the count itself differ between its versions."""
    return sys.getrefcount(getattr(owner, name))


def mark_states(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    """Put the storages of an optimizer's states into their category."""
    found: list[torch.Tensor] = []
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else (state,):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif not isinstance(value, (int, float, str)):
                found += tensors_in(value)
    recorder.mark(found, "optimizer state")
