"""A recorder for a script: its modules are met as they are called, its steps end where its optimizers step."""
from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from analyzer.distributed.world_state import current_world
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.intercept.compiled_function import written_forward
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.spec import Signature
from analyzer.output import print_error

from .evaluation import EVALUATION, OuterRun, describe_batches, find_evaluation, leave_out
from .hooks import FAILED
from .joined_step import StepDescription, join_steps
from .memory_recorder import ROOT, MemoryRecorder
from .optimizer_step import list_optimizers, observed_steps
from .preparation import EARLIER_PREPARATION, PREPARATION, describe_preparation, find_preparation
from .recorder import Recorder
from .script_module import ObjectNumbers, ScriptRoot, ScriptRoots, StepCounts
from .storage_lifetime import OUTSIDE, StorageLifetime
from .tensor_walk import local_part, tensors_in

SETUP = "setup"  #: the phase before the first model is called
HELD = "held by the script"
_PATIENCE = 10  # steps that wait for an optimizer to step: a critic steps five times before its generator (WGAN-GP)
_TOLD_AT = (50, 500, 5_000, 50_000)  # forward passes without a step of an optimizer


class EnoughSteps(BaseException):
    """Ends a script that took the steps asked for. No Exception, so that none of the script's handlers means it."""


class Script(torch.nn.Module):
    """Holds, once a script has ended, the modules that it called from outside of any module and that are there yet."""


@dataclass
class _Outer:
    """A call from outside of any module that runs now: of a module, or of a compiled function that may call some."""

    starts: tuple[int, int, int]  #: what was there before it, as `OuterRun` counts it
    is_compiled: bool = False
    module: torch.nn.Module | None = None  #: that is called; of those that a function calls, the first with parameters
    is_model: bool = False
    has_grad: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class ScriptRecorder(Recorder):
    """Listens to a script until its optimizers stepped ``steps`` times; more than one in turn make a step together.

    What the script lets go of is freed as without a recorder: ``describe`` is given each module and parameter of the
    script's own, and what tells them apart, and what it answers is kept in place of them.
    """

    def __init__(self, mode: MetaTensorMode, device: torch.device, is_leaf: Callable[[torch.nn.Module], bool] | None,
                 find_leaf_impl: Callable[[torch.nn.Module], Callable[..., Any] | None], steps: int,
                 describe: Callable[[Any, Callable[[Any], int]], Any] = lambda thing, key: None) -> None:
        self.script = Script()
        super().__init__(mode, MemoryRecorder(mode.space, device), self.script, is_leaf, find_leaf_impl)
        self._modules.clear()
        self.steps, self.describe = steps, describe
        self.step_counts = StepCounts()
        self._numbers = ObjectNumbers(self._forget)
        self._roots = ScriptRoots(self.log, self._module_index, self._numbers)
        #: of a rank: what its wrappers know of the world is asked at the end
        self._held: list[torch.nn.Module] | None = None if current_world() is None else []
        # after how many calls each step was taken
        self._steps_at: list[tuple[int, Callable[[], torch.optim.Optimizer | None], str]] = []
        self._outer: _Outer | None = None
        self._passes = 0
        self._new_roots: list[ScriptRoot] = []
        self._gathered: list[ScriptRoot] = []
        self._outer_runs: list[OuterRun] = []
        self._leaves: dict[int, Callable[[], torch.Tensor | None]] = {}  # that get gradients, of no module, by id
        self._described = [StepDescription([], [])]  # of steps before the one that is under way, as far as needed
        self.run.phase, self.memory.after_backward = SETUP, "optimizer"  # clipping, until a model is called again
        # until a module that has it is called, an optimizer steps, or it is given to a module
        self.memory.undecided = ("", HELD)

    @property
    def steps_taken(self) -> int:
        """Whole steps: every optimizer seen so far that is still there has stepped as often."""
        return self.step_counts.whole

    def share_done(self) -> float:
        """How many of the steps asked for are taken; how long a step takes, or what comes before it, is not known."""
        return self.steps_taken / self.steps

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
        self.describe_step(step)
        self._open_calls = [None] * len(self._open_calls)

    def _describe_last_whole_step(self) -> None:
        if self.log.steps <= self.described_step:  # which was not finished
            self.described_step = self.log.steps - 1
            self._described[-1].put_into(self.log)

    def finish(self) -> None:
        """The script has ended: what runs and is freed from now on, as where a trainer is interrupted and takes all to
        the host, is no part of it. A step that was not finished counts only if it is the only one.
        """
        self.memory.end()
        self.mode.state.recorder = self.memory.space.listener = None
        self.memory.let_go()
        self.log.steps = max(1, self.steps_taken)
        self._leave_out_evaluation()
        self._gather()

    def list_roots(self) -> list[ScriptRoot]:
        """What the script called and stepped that was there in the step described, with what was written down of it."""
        return self._gathered

    def _gather(self) -> None:
        """The script has ended: hold what is there, and write it down."""
        self._describe_all()
        self._gathered = self._roots.gather(self.described_step)
        for root in self._gathered:
            found = root.find()
            if isinstance(found, torch.nn.Module):
                self.script.add_module(root.name, found)
            elif found is not None:
                self.script._parameters[root.name] = found

    def _describe_all(self) -> None:
        for root, found in self._roots.live():
            root.shape = self.describe(found, self._numbers)

    def _forget(self, key: int) -> None:
        """An object of this id is gone: the next that gets it is another."""
        self._module_index.pop(key, None)
        self._parameter_owner.pop(key, None)
        self._leaves.pop(key, None)

    def end_short(self, error: DeviceOutOfMemoryError) -> None:
        """As in the base class; what came before may be evaluation."""
        super().end_short(error)
        self._leave_out_evaluation()
        self._gather()

    def _leave_out_evaluation(self) -> None:
        self._describe_last_whole_step()
        runs = self._outer_runs
        phases = dict.fromkeys(find_evaluation(self.log, runs), EVALUATION)
        evaluation = [run for run in runs if run.is_pass and run.calls.start in phases]
        prepared = find_preparation(self.log, runs, phases)
        for one in prepared:
            phases.update(dict.fromkeys(one.calls, PREPARATION if one is prepared[-1] else EARLIER_PREPARATION))
        leave_out(self.log, runs, phases, self.described_step)
        left_out = {run.calls.start for run in evaluation}
        batches = describe_batches([run for run in runs if run.calls.start not in left_out], self.log.steps - 1)
        if batches is not None:
            self.mode.state.assume(batches)
        if passes := Counter([self.log.modules[run.module].path for run in evaluation]):
            many = ", ".join([f"{count} of {path}" for path, count in passes.items()])
            self.mode.state.assume(f"forward passes that lead to no update ({many}) are a phase of their own, "
                                   f"{EVALUATION}: they are in no figure of a step, but peaks of memory are those of "
                                   "the whole run")
        if prepared:
            self.mode.state.assume(describe_preparation(self.log, prepared))
        if never := [type(optimizer).__name__ for optimizer in self.step_counts.list_expected()]:
            self.mode.state.assume(f"optimizers that are there and did not step while others did ({', '.join(never)}): "
                                   "what their steps take, and what comes before them, is in no figure")

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any) -> int:
        """A module's call begins; one from outside of any module begins a forward pass."""
        if not self.run.stack:
            if not self._roots.knows(module):
                self._adopt(module)
            shapes = self._mark_inputs(module, args, kwargs)
            is_model = next(module.parameters(), None) is not None
            if self.run.phase == SETUP and is_model:
                self._follow_device()
                for lifetime in self.log.storages.values():
                    if lifetime.died is None and not lifetime.category:
                        lifetime.category = HELD
            if self.run.phase == "forward" or self.run.phase in (SETUP, "optimizer") and is_model:
                self.memory.begin("forward")
                outer = self._outer = self._outer or _Outer(self._count_all())
                if not outer.is_model:
                    outer.module, outer.is_model, outer.shapes = module, is_model, shapes
                    outer.has_grad = torch.is_grad_enabled()
        return super().enter_module(module, args, kwargs)

    def leave_module(self, module: torch.nn.Module, token: int, result: Any) -> None:
        """The innermost call ends; where no module made it, what it did is noted."""
        super().leave_module(module, token, result)
        if self.run.stack:
            return
        for root in self._new_roots:
            root.shape = self.describe(module, self._numbers.new if root.is_class else self._numbers)
        self._new_roots.clear()
        if self._outer is not None and not self._outer.is_compiled:
            self._end_outer(self._outer, result is not FAILED)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """As in the base class. A compiled function that no module calls is a forward pass where it calls a model."""
        if self.run.stack or self._outer is not None:
            with super().tracing():
                yield
            return
        outer, has_ended = _Outer(self._count_all(), is_compiled=True), False
        self._outer = outer
        try:
            with super().tracing():
                yield
            has_ended = True
        finally:
            self._outer = None
            if outer.is_model:
                self._end_outer(outer, has_ended)

    def _end_outer(self, outer: _Outer, has_ended: bool) -> None:
        calls, nodes, module_calls = [range(start, end) for start, end in zip(outer.starts, self._count_all())]
        self._outer_runs.append(OuterRun(calls, nodes, module_calls, self._module_index[id(outer.module)],
                                         outer.is_model and has_ended, outer.has_grad, self.run.step, outer.shapes))
        self._outer = None
        self._passes += outer.is_model
        if not self.step_counts.counts and self._passes in _TOLD_AT:
            print_error(f"{self._passes} forward passes so far, and no optimizer has stepped: this ends after "
                        f"{self.steps} optimizer steps, or when the script does")
        if self.run.phase == "forward":
            self.memory.begin("forward")

    def _count_all(self) -> tuple[int, int, int]:
        return self.count_calls(), len(self.log.node_slots), len(self.log.module_call_slots)

    def called(self, signature: Signature, inputs: list[MetaStorage], outputs: list[MetaStorage]) -> None:
        """An operator just ran; outside of modules it has a record of its phase for itself: it may be evaluation's."""
        super().called(signature, inputs, outputs)
        if not self.run.stack and self.run.phase == "forward":
            self.memory.begin("forward")

    def _follow_device(self) -> None:
        """Watch the device that the script is on: a launcher may show each process one device alone."""
        memory, space, own = self.memory, self.memory.space, self.log.device
        used = {index: a.allocated_bytes for index, a in space.allocators.items() if a.allocated_bytes}
        if memory.allocator is space.host or memory.allocator.allocated_bytes or not used or memory.others:
            return
        index = max(used, key=used.__getitem__)
        observer, memory.allocator.observer = memory.allocator.observer, None
        memory.allocator = space.allocator(index)
        memory.allocator.observer, self.log.device = observer, f"cuda:{index}"
        self.mode.state.assume(f"the script is on cuda:{index}, though its local rank is {own.rpartition(':')[2]}: the "
                               f"memory of cuda:{index} was followed")

    def _adopt(self, module: torch.nn.Module) -> None:
        """Take a module that the script calls into the log; one without state, such as a loss, stands for its class."""
        root, settled = self._roots.take(module, lambda: self.run.step)
        moved = [module for _, module in settled]
        for lifetime in self._lifetimes_of(moved):
            if lifetime.category in ("parameter", "buffer"):
                lifetime.category = ""  # it has another path now
        self.own_parameters_of(moved)
        self._new_roots.append(root)
        if self._held is not None:
            self._held.append(module)

    def _lifetimes_of(self, modules: list[torch.nn.Module]) -> Iterator[StorageLifetime]:
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                storage = None if tensor is None or is_lazy(tensor) else self.memory.storage_of(tensor)
                lifetime = None if storage is None else self.log.storage_table.get(storage.number)
                if lifetime is not None and lifetime.module == self._module_index[id(module)]:
                    yield lifetime

    def own_parameters_of(self, modules: Iterable[torch.nn.Module]) -> None:
        """As in the base class; that a tensor is gone is told."""
        owned = list(modules)
        super().own_parameters_of(owned)
        for module in owned:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._numbers(tensor)

    def owner_of(self, variable: torch.Tensor) -> int:
        """As in the base class; a leaf of no module may be a parameter of the script's own."""
        if id(variable) not in self._parameter_owner and id(variable) not in self._leaves:
            self._numbers(variable)
            self._leaves[id(variable)] = weakref.ref(variable)
        return super().owner_of(variable)

    def _adopt_leaves(self, optimizer: torch.optim.Optimizer) -> None:
        """Take parameters of the script's own into the log: leaves that get gradients and that an optimizer steps."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._leaves]:
            if self._leaves.pop(id(parameter), None) is not None:
                root = self._roots.keep(parameter, lambda: self.run.step)
                self._parameter_owner[id(parameter)] = ROOT
                self._own(parameter, "parameter", root.name, ROOT)
                root.shape = self.describe(parameter, self._numbers)

    def _mark_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
        """What a module is called with from outside and no module made is an input; the shapes by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        names: list[str] = []
        with suppress(TypeError, ValueError):
            names += inspect.signature(written_forward(module)).parameters
        for i, (name, value) in enumerate([*((None, a) for a in args), *kwargs.items()]):
            label = name or (names[i] if i < len(names) else f"input_{i}")
            inputs = [t for t in tensors_in(value) if self._is_input(t)]
            self.memory.mark(inputs, "input", label)
            shapes.update((label if place == 0 else f"{label}_{place}", tuple(t.shape))
                          for place, t in enumerate(inputs))
        return shapes

    def _is_input(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        storage = self.memory.storage_of(tensor)
        lifetime = None if storage is None else self.log.storages.get(storage.number)
        return lifetime is not None and lifetime.node == OUTSIDE and lifetime.module == 0

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """All of a script runs under the mode: its parameters are those of the run."""

    def _join_steps(self) -> None:
        """An optimizer that was there from the first step on stepped: what were taken for steps are parts of it."""
        self.memory.end()
        self._outer_runs = join_steps(self.log, self._outer_runs, [*self._described, StepDescription.of(self.log)])
        for root in self._roots.roots:
            root.died_in = None if root.died_in is None else 0
        self.step_counts.join()
        self.run.step = self.described_step = 0

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.hears():
            if not self.step_counts.counts:
                self.step_counts.expect([one for one in list_optimizers() if any(
                    getattr(find_storage(local_part(p)), "space", None) is self.memory.space
                    for group in one.param_groups for p in group["params"])])  # others are of another run
            self.step_counts.name(optimizer)
            self._adopt_leaves(optimizer)
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
            self._steps_at.append((self.count_calls(), weakref.ref(optimizer), name))
        before = self.steps_taken
        self.step_counts.add(name, self.run.step)
        joins = optimizer is not None and self.step_counts.meet(optimizer) and self.run.step > 0
        if joins:
            self._join_steps()
        if self.steps_taken >= (max(self.steps, _PATIENCE) if self.step_counts.list_expected() else self.steps):
            self.finish()
            raise EnoughSteps
        if joins or self.steps_taken > before:
            if not joins:  # else modules were described when the step began that is none
                self._describe_all()
            self.start_step(self.steps_taken, placeholders=False)
