"""Fills a log while a model runs under the mode."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from analyzer.errors import InputError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import find_storage
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.state import NO_EVENT, StreamAction, current
from analyzer.meta.tensor import is_around_tensors

from .call_recorder import CallRecorder
from .hooks import listen
from .module_recorder import ModuleRecorder
from .process_group import read_world
from .tensor_walk import local_part

if TYPE_CHECKING:
    from .cycle import Cycle, NamedStretch


def _no_leaf(module: torch.nn.Module) -> bool:
    return False


class Recorder:
    """Listens to a `MetaTensorMode` and writes a `Log`, by three objects of which each holds those before it:

        memory    births and deaths of storages and what they are for, and phases
        modules   calls of modules, nodes, and which parameters and buffers modules hold
        calls     calls of operators

    Where the run is, and who else hears of it, they all read in `run`.
    """

    def __init__(self, mode: MetaTensorMode, modules: ModuleRecorder) -> None:
        self.mode, self.modules, self.memory, self.run = mode, modules, modules.memory, modules.run
        self.calls = CallRecorder(modules)
        self.log = modules.log
        self.outer_steps = 0  #: how many steps of a library, with an optimizer's inside, are under way
        self.has_own_steps = False  #: steps are the caller's own, with optimizers that the driver need not know
        self.cycles: Sequence[Cycle] = ()  #: of a script, once it has ended
        self.blocks: Sequence[NamedStretch] | None = None  #: of one that ran to its end; else None
        self.history: str | None = None  #: what an optimizer will hold and does not yet

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        state, memory = self.mode.state, self.memory
        state.recorder, memory.space.listener = self, memory
        if memory.space.stream:
            memory.ordered(StreamAction.SWITCH, memory.space.stream, NO_EVENT)
        if getattr(self.mode.options, "keep_events", False):
            memory.observe_memory()
        self.calls.start_step()
        try:
            with listen(self, is_simulated=True):
                yield self
        finally:
            memory.end()
            state.recorder = memory.space.listener = None
            memory.let_go()
            memory.watch_fullest()
            self.modules.skipper, self.modules.listed = None, []  # a recorder that outlives the run keeps no model
            self.log.assumptions = [*state.assumptions, *([] if self.history is None else [self.history])]
            self.log.world = read_world() or self.log.world

    def hears(self) -> bool:
        """Whether what this thread runs now is for this recorder."""
        state = current()
        return state is not None and state.recorder is self

    def start_step(self, step: int, placeholders: bool = True) -> None:
        """Another step begins: its first nodes are the inputs, unless the driver has its own."""
        self.modules.start_step(step, placeholders)
        self.calls.start_step()

    def repeat_calls(self, begin: int, end: int) -> None:
        """A graph of the device with these calls is launched again."""
        self.calls.repeat(begin, end)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A block in which modules are called for the sake of the graph that is made of them: none is a node."""
        modules = self.modules
        before = modules.is_leaf, modules.skipper
        modules.is_leaf, modules.skipper = None if modules.is_leaf is None else _no_leaf, None
        try:
            yield
        finally:
            modules.is_leaf, modules.skipper = before

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError where an optimizer that is about to step holds parameters of before the run."""
        memory = self.memory
        with torch._C.DisableTorchFunction():  # what is asked here is no call of the user's
            held = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
            if all([getattr(find_storage(p), "space", memory.space) is memory.space and memory.storage_of(p) is not None
                    for p in held if p.layout is torch.strided and not is_around_tensors(p)]):
                return
        name = type(optimizer).__name__
        raise InputError(
            f"step: {name} holds the parameters from before the run, and the profile uses others in their place, so "
            f"its updates and states would be in no figure. Pass optimizer=lambda params: {name}(params, ...), and "
            "step is given that optimizer; or make it inside step; or profile in a world, which keeps the parameters "
            "that the model was built with: with analyzer.parallel.world(1): profile(build, step=...)")

    def end_short(self, error: DeviceOutOfMemoryError) -> None:
        """The run ended with ``error``: what was not finished is no step."""
        self.calls.ran_out("(outside an operator)", error)
        assert self.calls.shortage is not None
        self.log.shortage = self.calls.shortage
        if self.log.shortage.step:
            self.log.steps = self.log.shortage.step  # the steps before it are whole
