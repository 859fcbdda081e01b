"""Parameters in groups that a foreach or fused optimizer takes: torch mixes tensors that are sharded with others, or
over other ranks, in no list.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.state import active_state
from analyzer.recipe.optimizer import TORCHS_OWN
from analyzer.record.eager import StepOptimizer


def keep_layouts_apart(name: str | None, factory: StepOptimizer | None) -> StepOptimizer | None:
    """``factory``, called with a group for each mesh where ``name`` is one of PyTorch's optimizers."""
    if factory is None or name not in TORCHS_OWN:
        return factory

    def make(parameters: list[torch.nn.Parameter], model: torch.nn.Module) -> torch.optim.Optimizer:
        groups: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        if len(groups) < 2:
            return factory(parameters, model)
        active_state().assume(f"the optimizer has {len(groups)} groups of parameters, one for each way of sharding: "
                              "torch mixes them in no list")
        made: list[Any] = [{"params": group} for group in groups.values()]
        return factory(made, model)

    return make
