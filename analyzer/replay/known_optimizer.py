"""The states of an optimizer."""
from __future__ import annotations

import torch

from analyzer.record.recorder import Recorder, tensors_in


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
