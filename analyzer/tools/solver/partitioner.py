"""A plan's memory by PyTorch's own means: the budget with which torch.compile's partitioner keeps a step within it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._functorch import config

from analyzer.api.profile import profile
from analyzer.errors import InputError
from analyzer.record.progress import progress_of

from .plan import Plan
from .recorded_step import PartitionedStep

#: Tried in this order: what is saved at most, for what is saved by a compiled step without a budget 1 and by one that
#: runs everything again 0 (`activation_memory_budget` in torch/_functorch/config.py).
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def find_memory_budget(plan: Plan, model: torch.nn.Module, args: Any = (), kwargs: dict[str, Any] | None = None, *,
                       loss_fn: Callable[[Any], torch.Tensor] | None = None,
                       autocast: torch.dtype | None = None) -> Plan:
    """``plan`` with `Plan.partitioned`: the compiled step for each of `BUDGETS`, up to the first that takes no more at
    its peak than the plan. ``model`` is the planned one, under torch.compile or with modules that are; the rest is as
    of `Planner`. Raises InputError for a plan that was not measured or is for no device, and where nothing of the model
    is compiled.

    >>> from analyzer import symbolic_trace
    >>> from analyzer.tools.solver import solve
    >>> model = torch.nn.Sequential(*(m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())))
    >>> x = torch.empty(4096, 64)
    >>> plan = solve(symbolic_trace(model, meta_args={"input": x}), 0.8, args=(x,), device="h100")
    >>> found = find_memory_budget(plan, torch.compile(model), x)
    >>> 0 <= found.memory_budget < 1, found.partitioned[-1].peak_bytes <= plan.whole_step_bytes(plan.planned)
    (True, True)
    """
    if plan.planned is None or plan.device is None:
        raise InputError("find_memory_budget(): the plan " + ("was not measured; solve it from a graph" if plan.device
                         else "is for no device, and a compiler makes kernels for one; solve it with device="))
    tried: list[PartitionedStep] = []
    for i, budget in enumerate(BUDGETS):
        with progress_of(i, len(BUDGETS), f"activation_memory_budget={budget}"), config.patch(
                activation_memory_budget=budget):
            found = profile(model, args, kwargs, loss_fn=loss_fn, autocast=autocast, device=plan.device)
        if found.compiled is None:
            raise InputError(f"find_memory_budget({found.name}): nothing is under torch.compile, whose partitioner "
                             "takes the budget; give torch.compile(model)")
        peak = max((found.peak_allocated_bytes or 0) + plan.held_bytes, plan.update_bytes)
        tried.append(PartitionedStep(budget, peak, found.recompute_flops, found.step_seconds))
        if peak <= plan.whole_step_bytes(plan.planned):
            break
    return replace(plan, partitioned=tuple(tried))
