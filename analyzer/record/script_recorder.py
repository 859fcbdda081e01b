"""A recorder for a script: its modules are met as they are called, its steps end where its optimizers step."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import find_storage
from analyzer.meta.mode import MetaTensorMode

from .cycle import OptimizerStep, find_cycles
from .device_log import EARLIER_PREPARATION, EVALUATION, PREPARATION
from .evaluation import describe_batches, describe_graphs, find_evaluation, leave_out
from .joined_step import StepDescription, join_steps
from .memory_recorder import MemoryRecorder
from .module_recorder import ModuleRecorder
from .optimizer_step import list_optimizers, observed_steps
from .preparation import describe_preparation, find_preparation
from .recorder import Recorder
from .script_course import ScriptCourse
from .script_holdings import Script, ScriptHoldings
from .script_module import StepCounts
from .script_passes import HELD, SETUP, ScriptPasses
from .tensor_walk import local_part

_PATIENCE = 10  # steps that wait for an optimizer to step: a critic steps five times before its generator (WGAN-GP)


class EnoughSteps(BaseException):
    """Ends a script that took the steps asked for. No Exception, so that none of the script's handlers means it."""


class ScriptRecorder(Recorder):
    """Listens to a script until its optimizers stepped ``steps`` times; more than one in turn make a step together.
    With None it is ended after a few steps, or where its second cycle has ended (`ScriptCourse`); one that does not
    ``ends`` it lets the script go on to its end.
    What it holds itself, which is written down by ``describe``, is in `holdings`; its forward passes are in `passes`.
    """

    def __init__(self, mode: MetaTensorMode, device: torch.device, is_leaf: Callable[[torch.nn.Module], bool] | None,
                 find_leaf_impl: Callable[[torch.nn.Module], Callable[..., Any] | None], steps: int | None,
                 describe: Callable[[Any, Callable[[Any], int]], Any] = lambda thing, key: None,
                 ends: bool = True) -> None:
        self.script, self._ends = Script(), ends
        memory = MemoryRecorder(mode.space, device)
        super().__init__(mode, ModuleRecorder(memory, self.script, is_leaf, find_leaf_impl))
        self.modules.listed, self.modules.share_done = [], 0.0
        self.calls.is_cut_outside = True
        self.course = ScriptCourse(steps, lambda: len(self.log.call_slots))
        self.steps, self.step_counts = self.course.least, StepCounts()
        self.holdings = ScriptHoldings(self.modules, self.script, describe)
        self.passes = ScriptPasses(mode.state, self.modules, self.holdings, self.steps, self.step_counts,
                                   self._begin_pass)
        self.run.listeners.append(self.passes)
        # after how many calls each step was taken
        self._step_start = 0  # how many calls came before the step that is under way
        self._steps_at: list[tuple[int, Callable[[], torch.optim.Optimizer | None], str]] = []
        self._described = [StepDescription([], [])]  # of steps before the one that is under way, as far as needed
        self.run.phase, memory.after_backward = SETUP, "optimizer"  # clipping, until a model is called again
        # until a module that has it is called, an optimizer steps, or it is given to a module
        memory.undecided = ("", HELD)

    @property
    def steps_taken(self) -> int:
        """Whole steps: every optimizer seen so far that is still there has stepped as often."""
        return self.step_counts.whole

    @property
    def has_called_model(self) -> bool:
        """Whether the script got beyond what comes before the first call of a model."""
        return any(record.phase != SETUP for record in self.log.phases)

    @contextmanager
    def counting_steps(self) -> Iterator[None]:
        """End the script with EnoughSteps after the steps asked for; inside `recording`, whose hooks run first."""
        with observed_steps(self._before_step, self._after_step):
            self.start_step(0, placeholders=False)
            yield

    def start_step(self, step: int, placeholders: bool = True) -> None:
        """As in the base class; calls of modules are written down of this step, which may be the last whole one."""
        super().start_step(step, placeholders)
        if step <= 1 or not self.step_counts.list_expected():
            self._described.clear()
        self._described.append(StepDescription.of(self.log))
        self.modules.describe_step(step)

    def _describe_last_whole_step(self) -> None:
        if self.log.steps <= self.modules.described_step:  # which was not finished
            self.modules.described_step = self.log.steps - 1
            self._described[-1].put_into(self.log)

    def finish(self) -> None:
        """The script has ended: what runs and is freed from now on, as where a trainer is interrupted and takes all to
        the host, is no part of it. A step that was not finished counts only if it is the only one.
        """
        self.memory.end()
        self._close_blocks()
        self.mode.state.recorder = self.memory.space.listener = None
        self.memory.let_go()
        self.log.steps = max(1, self.steps_taken)
        self._leave_out_evaluation()
        self.holdings.gather()

    def end_short(self, error: DeviceOutOfMemoryError) -> None:
        """As in the base class; what came before may be evaluation."""
        super().end_short(error)
        self._close_blocks()
        self._leave_out_evaluation()
        self.holdings.gather()

    def _leave_out_evaluation(self) -> None:
        self._describe_last_whole_step()
        runs = self.passes.outer_runs
        phases = dict.fromkeys(find_evaluation(self.log, runs), EVALUATION)
        evaluation = [run for run in runs if run.is_pass and run.calls.start in phases]
        self.blocks = None if self._ends else self.course.blocks
        with self.log.reading():
            self.cycles = find_cycles(self.log, runs, self.course.blocks, self.course.optimizer_steps, phases)
        prepared = find_preparation(self.log, runs, phases)
        for one in prepared:
            phases.update(dict.fromkeys(one.calls, PREPARATION if one is prepared[-1] else EARLIER_PREPARATION))
        leave_out(self.log, runs, phases, self.modules.described_step)
        left_out = {run.calls.start for run in evaluation}
        batches = describe_batches([run for run in runs if run.calls.start not in left_out], self.log.steps - 1)
        if batches is not None:
            self.mode.state.assume(batches)
        if passes := Counter([self.log.modules[run.module].path for run in evaluation]):
            many = ", ".join([f"{count} of {path}" for path, count in passes.items()])
            self.mode.state.assume(f"forward passes that lead to no update ({many}) are a phase of their own, "
                                   f"{EVALUATION}: they are in no figure of a step, but peaks of memory are those of "
                                   "the whole run")
        if (said := describe_graphs(self.log, evaluation)) is not None:
            self.mode.state.assume(said)
        if prepared:
            self.mode.state.assume(describe_preparation(self.log, prepared))
        if never := [type(optimizer).__name__ for optimizer in self.step_counts.list_expected()]:
            self.mode.state.assume(f"optimizers that are there and did not step while others did ({', '.join(never)}): "
                                   "what their steps take, and what comes before them, is in no figure")

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """As in the base class. A compiled function that no module calls is a forward pass where it calls a model."""
        with self.passes.compiled(), super().tracing():
            yield

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """All of a script runs under the mode: its parameters are those of the run."""

    def _join_steps(self) -> None:
        """An optimizer that was there from the first step on stepped: what were taken for steps are parts of it."""
        self.memory.end()
        self.passes.outer_runs = join_steps(self.log, self.passes.outer_runs,
                                            [*self._described, StepDescription.of(self.log)])
        self.holdings.join_steps()
        self.step_counts.join()
        self.course.join()
        self.run.step = self.modules.described_step = 0

    def enter_block(self, name: str) -> bool:
        """The script is inside a block that it calls so; what is allocated is told apart from what was before. The
        result is whether `leave_block` is to be called: what a module does is no phase.
        """
        if self.run.stack:
            return False
        self.memory.end()
        if self.course.enter(name, self.steps_taken):
            self._end_script()
        self.memory.block = self.course.block
        self.passes.begin_block(name)
        self.memory.space.host.begin_lap()
        return True

    def leave_block(self) -> None:
        self.memory.end()
        host = self.memory.space.host
        self.course.leave(self.memory.allocator.allocated_bytes, self.log.events,
                          (host.allocated_bytes, host.lap_peaks()[0]))
        self.memory.block = self.course.block

    def _close_blocks(self) -> None:
        while self.course.is_in_block:
            self.leave_block()

    def _begin_pass(self) -> None:
        if not torch.is_grad_enabled() and self.course.begin_pass(self.steps_taken):
            self._end_script()

    def _end_script(self) -> None:
        self.finish()
        raise EnoughSteps

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.hears():
            self._step_start = len(self.log.call_slots)
            if not self.step_counts.counts:
                self.step_counts.expect([one for one in list_optimizers() if any(
                    getattr(find_storage(local_part(p)), "space", None) is self.memory.space
                    for group in one.param_groups for p in group["params"])])  # others are of another run
            self.step_counts.name(optimizer)
            self.holdings.adopt_leaves(optimizer)
            self.memory.mark([p.grad for group in optimizer.param_groups for p in group["params"]
                              if p.grad is not None], "gradient")

    def repeat_calls(self, begin: int, end: int) -> None:
        """As in the base class; a step among them is a step once more."""
        for index, find, name in [step for step in self._steps_at if begin < step[0] <= end]:
            super().repeat_calls(begin, index)
            begin = index
            self._count_step(find(), name)
            self.memory.resume("forward")
        super().repeat_calls(begin, end)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.hears():
            self._count_step(optimizer, self.step_counts.name(optimizer))

    def _count_step(self, optimizer: torch.optim.Optimizer | None, name: str) -> None:
        if optimizer is not None:
            self.memory.mark_states(optimizer)
            if self.run.step == 0 and (said := self.memory.describe_wide_states(optimizer)) is not None:
                self.mode.state.assume(said)
            self._steps_at.append((self.calls.count(), weakref.ref(optimizer), name))
        before = self.steps_taken
        self.step_counts.add(name, self.run.step)
        self.modules.share_done = self.steps_taken / self.steps  # how long a step takes is not known
        joins = optimizer is not None and self.step_counts.meet(optimizer) and self.run.step > 0
        if joins:
            self._join_steps()
        stop = len(self.log.call_slots)
        self.course.add_step(OptimizerStep(name, min(self._step_start, stop), stop, self.steps_taken))
        enough = max(self.steps, _PATIENCE) if self.step_counts.list_expected() else self.steps
        if self._ends and self.steps_taken >= enough and (
                not self.course.waits(self.steps_taken, lambda: find_evaluation(self.log, self.passes.outer_runs))):
            self._end_script()
        if joins or self.steps_taken > before:
            if not joins:  # else modules were described when the step began that is none
                self.holdings.describe_all()
            self.start_step(self.steps_taken, placeholders=False)
