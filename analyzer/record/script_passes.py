"""The forward passes of a script: calls from outside of any module, which may lead to an update or be evaluation."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from analyzer.meta.source_line import script_line
from analyzer.meta.state import MetaState
from analyzer.output import print_error

from .cycle import ROLLOUT
from .evaluation import OuterRun
from .hooks import FAILED
from .memory_recorder import MemoryRecorder
from .module_recorder import ModuleRecorder
from .recorded_run import RunListener
from .script_holdings import ScriptHoldings
from .script_module import StepCounts

SETUP = "setup"  #: the phase before the first model is called
HELD = "held by the script"
_TOLD_AT = (50, 500, 5_000, 50_000)  # forward passes without a step of an optimizer


@dataclass
class _Outer:
    """A call from outside of any module that runs now: of a module, or of a compiled function that may call some."""

    starts: tuple[int, int, int]  #: what was there before it, as `OuterRun` counts it
    is_compiled: bool = False
    module: torch.nn.Module | None = None  #: that is called; of those that a function calls, the first with parameters
    is_model: bool = False
    has_grad: bool = False
    line: str | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class ScriptPasses(RunListener):
    """Takes what a script calls from outside of any module into the log: each call of a model begins a forward pass.
    ``steps`` of optimizers are waited for, of which ``step_counts`` tells what there were. ``begins`` is called before
    each pass.
    """

    def __init__(self, state: MetaState, modules: ModuleRecorder, holdings: ScriptHoldings, steps: int,
                 step_counts: StepCounts, begins: Callable[[], None]) -> None:
        self._begins = begins
        self.state, self.modules, self.holdings = state, modules, holdings
        self.memory, self.run, self.log = modules.memory, modules.run, modules.log
        self.steps, self.step_counts = steps, step_counts
        self.outer_runs: list[OuterRun] = []
        self._outer: _Outer | None = None
        self._passes = 0

    def leaf_met(self, variable: torch.Tensor) -> None:
        self.holdings.leaf_met(variable)

    def module_entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module's call begins; one from outside of any module begins a forward pass."""
        if self.run.stack:
            return
        if self._outer is None and next(module.parameters(), None) is not None:
            self._begins()
        self.holdings.meet(module)
        shapes = self.holdings.mark_inputs(module, args, kwargs)
        phase, is_model = self.run.phase, next(module.parameters(), None) is not None
        if phase == SETUP and is_model:
            self._end_setup()
        if phase == "forward" or phase in (SETUP, "optimizer") and is_model:
            self.memory.begin("forward")
            outer = self._outer = self._outer or _Outer(self._count_all())
            if not outer.is_model:
                outer.module, outer.is_model, outer.shapes = module, is_model, shapes
                outer.has_grad, outer.line = torch.is_grad_enabled(), script_line()

    def begin_block(self, name: str) -> None:
        """A rollout that the script, or what stands in for its engine, names so is no part of what comes before the
        first step. All that an engine does may be one operator, whose memory is of the block too.
        """
        if name == ROLLOUT:
            if self.run.phase == SETUP:
                self._end_setup()
                self.run.phase = "forward"
            self.memory.begin(self.run.phase)

    def _end_setup(self) -> None:
        follow_device(self.memory, self.state)
        for lifetime in self.log.storages.values():
            if lifetime.died is None and not lifetime.category:
                lifetime.category = HELD

    def module_left(self, module: torch.nn.Module, result: Any) -> None:
        """The innermost call ended; where no module made it, what it did is noted."""
        if self.run.stack:
            return
        self.holdings.describe_new(module)
        if self._outer is not None and not self._outer.is_compiled:
            self._end(self._outer, result is not FAILED)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """A compiled function runs: one that no module calls is a forward pass where it calls a model."""
        if self.run.stack or self._outer is not None:
            yield
            return
        outer, has_ended = _Outer(self._count_all(), is_compiled=True), False
        self._outer = outer
        try:
            yield
            has_ended = True
        finally:
            self._outer = None
            if outer.is_model:
                self._end(outer, has_ended)

    def _end(self, outer: _Outer, has_ended: bool) -> None:
        calls, nodes, module_calls = [range(start, end) for start, end in zip(outer.starts, self._count_all())]
        self.outer_runs.append(OuterRun(calls, nodes, module_calls, self.modules.index_of[id(outer.module)],
                                        outer.is_model and has_ended, outer.has_grad, self.run.step, outer.shapes,
                                        outer.line))
        self._outer = None
        self._passes += outer.is_model
        if not self.step_counts.counts and self._passes in _TOLD_AT:
            print_error(f"{self._passes} forward passes so far, and no optimizer has stepped: this ends after "
                        f"{self.steps} optimizer steps, or when the script does")
        if self.run.phase == "forward":
            self.memory.begin("forward")

    def _count_all(self) -> tuple[int, int, int]:
        return len(self.log.call_slots), len(self.log.node_slots), len(self.log.module_calls)


def follow_device(memory: MemoryRecorder, state: MetaState) -> None:
    """Watch the device that the script is on: a launcher may show each process one device alone."""
    space, own = memory.space, memory.log.device
    used = {index: a.allocated_bytes for index, a in space.allocators.items() if a.allocated_bytes}
    if memory.allocator is space.host or memory.allocator.allocated_bytes or not used or memory.others:
        return
    index = max(used, key=used.__getitem__)
    observer, memory.allocator.observer = memory.allocator.observer, None
    memory.allocator = space.allocator(index)
    memory.allocator.observer, memory.log.device = observer, f"cuda:{index}"
    state.assume(f"the script is on cuda:{index}, though its local rank is {own.rpartition(':')[2]}: the memory of "
                 f"cuda:{index} was followed")
