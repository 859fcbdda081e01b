"""The steps of a rank of a world, until they are alike: what wrappers keep changes in the first ones."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from analyzer.distributed.collective import current_collectives
from analyzer.record.eager import EagerStep

REPLACED = "replaced parameter"  #: category of what a parameter was in, before a wrapper put it elsewhere


class RankStep(EagerStep):
    """A training or inference step of a rank, repeated until nothing of it changes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._follow_parameters()

    def is_last(self, index: int) -> bool:
        """As many steps as asked for; where that is more than one, as many as wrappers take to be what they stay."""
        asked = self.options.steps
        return index + 1 >= (asked if asked == 1 else max(asked, self._steps_to_settle()))

    def _steps_to_settle(self) -> int:
        """Of DDP the second forward pass makes the buckets anew, or the third where the graph is static, since the
        first backward pass only counts; where unused parameters are looked for, none does (``should_rebuild_buckets``
        and ``autograd_hook`` in torch/csrc/distributed/c10d/reducer.cpp). ZeRO that overlaps with DDP makes its states
        in the step after that (torch/distributed/algorithms/ddp_comm_hooks/ddp_zero_hook.py).
        """
        steps = 1
        for wrapper in current_collectives().list_reducers():
            if wrapper.static_graph:
                steps = max(steps, 4)
            elif not wrapper.find_unused_parameters:
                steps = max(steps, 3)
        optimizer = self.optimizer
        overlaps = isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._overlap_with_ddp
        return steps + 1 if overlaps else steps

    def update(self) -> None:
        """The optimizer's part."""
        super().update()
        self._follow_parameters()

    def _custom(self) -> None:
        super()._custom()
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        """Parameters may be put into other tensors: `ZeroRedundancyOptimizer` puts those of a rank into one."""
        if self.mode != "train":
            return
        recorder, table = self.recorder, self.recorder.log.storage_table
        with torch._C.DisableTorchFunction():
            recorder.mark(self.parameters, "parameter")
        for lifetime in recorder.log.lifetimes_in("parameter"):
            if lifetime.died is not None and lifetime.number in table:
                lifetime.category = REPLACED
