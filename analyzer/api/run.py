"""`Run`: a module borrowed and recorded, until its log is finished."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.fx.module_borrow import Borrowed, borrow_module
from analyzer.fx.module_wrapper import find_replica, refuse_sharded
from analyzer.fx.surroundings import keep_surroundings
from analyzer.fx.tensor_key import TensorKeys
from analyzer.fx.trace.tracer_impl import find_leaf_impl, is_leaf
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.argument import fake_arguments, tell_met
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.on_use import rare_collections
from analyzer.profilers.annotation import Annotation, Profiler
from analyzer.record.log import Log
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder

from .argument import describe_training, mark_inputs
from .further_module import describe_further
from .session import Session

#: what is assumed of a model of which each rank has a copy
UNKNOWN_COMMUNICATION = (
    "{}: DistributedDataParallel is run as one rank alone; the bytes that ranks exchange are unknown, and the seconds "
    "of the exchange and the memory of its buckets are in no figure")


class Run:
    """One run of a session; of a module that ``is_replica``, one of several, bytes communicated are unknown."""

    def __init__(self, session: Session, recorder: Recorder, root: torch.nn.Module, borrowed: Borrowed | None = None,
                 *, is_replica: bool = False) -> None:
        self.session, self.recorder, self.root = session, recorder, root
        self._borrowed, self.is_replica = borrowed, is_replica
        #: of profilers that ask nothing of the device, by profiler and what was in the log
        self.annotations: dict[tuple[Profiler, str, int, int], Annotation] = {}

    @property
    def borrowed(self) -> Borrowed:
        assert self._borrowed is not None, "this run borrows no module"
        return self._borrowed

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record for the length of a block; it ends early, and the log says so, where a step needs too much memory."""
        recorder = self.recorder
        with recorder.recording():
            try:
                yield recorder
            except DeviceOutOfMemoryError as error:
                if not recorder.log.steps:
                    raise
                recorder.end_short(error)

    def take_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    names: Iterable[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data in place of those given; they and the module's tensors are there before a step."""
        taken = self.fake_inputs(args, kwargs, self.session.device)
        recorder, borrowed = self.recorder, self.borrowed
        with torch._C.DisableTorchFunction():
            attributes = [fake for fake, _ in borrowed.attributes]
            held = [fake for group in (borrowed.parameters, borrowed.buffers) for _, fake, _ in group]
            recorder.memory.register_existing([*held, *attributes])
            recorder.modules.own_parameters_of(borrowed.by_path.values())
            recorder.memory.mark(attributes, "buffer")
            for fake in attributes:
                tell_met(recorder.mode.state, fake)
            mark_inputs(recorder, *taken, names)
        return taken

    def fake_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data on ``device`` in place of those given."""
        taken: tuple[tuple[Any, ...], dict[str, Any]] = fake_arguments(
            self.recorder.mode.state, (args, dict(kwargs)), device)
        return taken

    def replace_log(self, log: Log) -> None:
        self.recorder.log = log
        self.annotations.clear()

    def describe_training(self) -> None:
        with torch._C.DisableTorchFunction():
            text = describe_training(self.borrowed.walked, self.recorder.log)
        if text is not None:
            self.recorder.log.assumptions.append(text)


@contextmanager
def open_run(session: Session, module: torch.nn.Module, options: ProfileOptions | None = None, *, eager: bool = True,
             given: Any = ()) -> Iterator[Run]:
    """A run of ``module``, which is borrowed for the block; ``eager`` is not by a graph interpreter. The containers
    of what it is ``given`` are put back afterwards.
    """
    refuse_sharded(module)
    functions = session.loss_fn, session.step, session.factory
    with (InterruptsDeferred(), rare_collections(), session.simulate(options) as mode,
          keep_surroundings(module, functions, given) as surroundings,
          borrow_module(module, session.device, session.further) as borrowed,
          TensorKeys(borrowed, surroundings.records)):
        session.reached = surroundings.modules
        if session.evaluates:
            borrowed.root.eval()
        replica = find_replica(borrowed.walked)
        if replica is not None:
            mode.state.assume(UNKNOWN_COMMUNICATION.format(replica or "the model"))
        modules = ModuleRecorder(MemoryRecorder(mode.space, session.device), borrowed.root, is_leaf if eager else None,
                                 find_leaf_impl if eager else lambda module: None, borrowed.walked)
        if session.options.compiles:
            modules.compiled = borrowed.compiled
        recorder = Recorder(mode, modules)
        for remark in describe_further(session.further, session.mode, session.optimizer, session.step):
            mode.state.assume(remark)
        yield Run(session, recorder, borrowed.root, borrowed, is_replica=replica is not None)
