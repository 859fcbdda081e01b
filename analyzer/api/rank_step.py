"""`RankStep`: a step of one rank, repeated until nothing of it changes."""
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from analyzer.distributed.collective import current_collectives
from analyzer.distributed.deepspeed import is_engine
from analyzer.errors import InputError
from analyzer.meta.state import active_state
from analyzer.recipe.optimizer import TORCHS_OWN
from analyzer.record.eager import EagerStep, StepOptimizer, check_loss
from analyzer.replay.short_run import ShortRun

# Parameters in groups that a foreach or fused optimizer takes: torch mixes tensors that are sharded with others, or
# over other ranks, in no list.


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


REPLACED = "replaced parameter"  #: category of what a parameter was in, before a wrapper put it elsewhere


class RankStep(EagerStep):
    """A training or inference step of a rank, repeated until nothing of it changes; in a ``short_run`` of a few
    blocks.
    """

    def __init__(self, *args: Any, short_run: ShortRun | None = None, **settings: Any) -> None:
        self.short_run = short_run
        super().__init__(*args, **settings)
        self.is_engine = self.mode == "train" and is_engine(self.model)
        if self.is_engine:
            self.step = self.step or self._run_engine
        self._follow_parameters()

    def run_step(self, index: int) -> None:
        if self.step is not None and self.short_run is None and index:
            self.recorder.modules.describe_step(index)  # a caller's own first step may do less than those behind it
        with nullcontext() if self.short_run is None else self.short_run.watching_reads():
            super().run_step(index)

    def is_last(self, index: int) -> bool:
        """As many steps as asked for; where that is more than one, as many as wrappers take to be what they stay."""
        # Of DDP the second forward pass makes the buckets anew, or the third where the graph is static, since the first
        # backward pass only counts; where unused parameters are looked for, none does (``should_rebuild_buckets`` and
        # ``autograd_hook`` in torch/csrc/distributed/c10d/reducer.cpp). ZeRO that overlaps with DDP makes its states in
        # the step after that (torch/distributed/algorithms/ddp_comm_hooks/ddp_zero_hook.py). DeepSpeed's stage 3 notes
        # the order of modules in the first step, and compares it among ranks at the start of the second (``reset_step``
        # of deepspeed/runtime/zero/partitioned_param_coordinator.py).
        asked, steps = self.options.steps, 3 if self.is_engine else 1
        for wrapper in current_collectives().reducers:
            if wrapper.static_graph:
                steps = max(steps, 4)
            elif not wrapper.find_unused_parameters:
                steps = max(steps, 3)
        optimizer = self.optimizer
        overlaps = isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._overlap_with_ddp
        return index + 1 >= (asked if asked == 1 else max(asked, steps + overlaps))

    def _run_engine(self, engine: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """A step of DeepSpeed's engine, as its documentation has it: deepspeed.ai/getting-started, "Training"."""
        if optimizer is not None:
            raise InputError("optimizer: DeepSpeed's engine has its own: name it in its configuration, or give it to "
                             "make_engine or deepspeed.initialize")
        for _ in range(engine.gradient_accumulation_steps()):
            loss = self.loss_fn(engine(*args, **kwargs))
            check_loss(loss)
            engine.backward(loss)
            del loss
            engine.step()

    def update(self) -> None:
        super().update()
        self._follow_parameters()

    def _custom(self) -> None:
        super()._custom()
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        """Parameters may be put into other tensors: `ZeroRedundancyOptimizer` puts those of a rank into one."""
        if self.mode != "train" or self.is_engine:  # which puts whole parameters elsewhere in each step
            return
        recorder, table = self.recorder, self.recorder.log.storages
        with torch._C.DisableTorchFunction():
            recorder.memory.mark(self.parameters, "parameter")
        for lifetime in recorder.log.lifetimes_in("parameter"):
            if lifetime.died is not None and lifetime.number in table:
                lifetime.category = REPLACED
